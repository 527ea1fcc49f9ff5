package oidc

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeRefused: the identity provider did not confirm the login.
	codeRefused fault.Code = "identity_refused"
	// codeUnavailable: the identity provider does not answer as it should.
	codeUnavailable fault.Code = "identity_provider_unavailable"
)
