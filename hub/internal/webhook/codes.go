package webhook

import "github.com/gpuaas/gpuaas/pkg/fault"

const (
	// codeTooManyWebhooks: the org has as many webhooks as it may.
	codeTooManyWebhooks fault.Code = "too_many_webhooks"
	// codeWebhookActive: the webhook is not disabled.
	codeWebhookActive fault.Code = "webhook_active"
)
