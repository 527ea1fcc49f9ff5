package command

import (
	"context"
	"errors"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func (m Meta) recordVersion(ctx context.Context, tx db.Tx, eventType, reason, orgID string, before *catalog.Version,
	after catalog.Version,
) error {
	data := map[string]any{"app_slug": after.AppSlug, "version": after.Version, "to": after.Status}
	if after.Status == catalog.Canary {
		data["canary_percent"] = after.CanaryPercent
	}
	if reason != "" {
		data["reason"] = reason
	}
	entry := change.Entry{
		Event: eventType, Action: iam.CatalogManage, ResourceType: resourceAppVersion, ResourceID: after.ID,
		Version: after.ResourceVersion, OrgID: orgID, Reason: reason,
		Data: data, After: map[string]any{
			"app_slug": after.AppSlug, "version": after.Version, "status": after.Status,
			"canary_percent": after.CanaryPercent, "publisher_key_id": after.PublisherKeyID,
		},
	}
	if before != nil {
		data["from"] = before.Status
		entry.Before = map[string]any{
			"app_slug": before.AppSlug, "version": before.Version, "status": before.Status,
			"canary_percent": before.CanaryPercent,
		}
	}
	return change.Record(ctx, tx, m.by(), entry)
}

// refusedDocument says why a signed document does not count. pointer is where the body has the document; fields of a
// fault are relative to the document.
func refusedDocument(err error, code fault.Code, pointer string) error {
	if f, ok := errors.AsType[*fault.Error](err); ok {
		out := *f
		out.Fields = nil
		for _, field := range f.Fields {
			field.Pointer = pointer + "/payload" + field.Pointer
			out.Fields = append(out.Fields, field)
		}
		return &out
	}
	reason := protocol.RefusalOf(err)
	if reason == protocol.Nack_REASON_UNSPECIFIED {
		return err
	}
	return fault.New(fault.Unprocessable, code, "The signed document is refused.", err).WithField(pointer,
		reason.Text()).Permanent()
}
