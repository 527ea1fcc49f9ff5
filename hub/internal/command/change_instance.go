package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// ChangeInstanceInput is the request; nil leaves a setting as it is.
type ChangeInstanceInput struct {
	DisplayName *string
	Config      map[string]any
}

// ChangeInstance renames an app instance or changes its config. It makes no revision, and no container notices. It
// answers with the changed instance.
func (s *Service) ChangeInstance(ctx context.Context, m Meta, projectID, instanceID string,
	in ChangeInstanceInput,
) (instance.Instance, error) {
	return db.RunTx(ctx, s.DB, func(tx db.Tx) (instance.Instance, error) {
		return s.changeInstance(ctx, tx, m, projectID, instanceID, in)
	})
}

func (s *Service) changeInstance(ctx context.Context, tx db.Tx, m Meta, projectID, instanceID string,
	in ChangeInstanceInput,
) (instance.Instance, error) {
	project, err := iam.InProject(ctx, tx, m.Principal, iam.InstanceUpgrade, projectID)
	if err != nil {
		return instance.Instance{}, err
	}
	before, err := instance.Get(ctx, tx, project.ID, instanceID)
	if err != nil {
		return instance.Instance{}, err
	}
	settings := instance.Settings{DisplayName: in.DisplayName}
	if in.Config != nil {
		text, err := object(in.Config)
		if err != nil {
			return instance.Instance{}, err
		}
		version, err := catalog.GetVersion(ctx, tx, before.AppSlug, before.Version)
		if err != nil {
			return instance.Instance{}, err
		}
		if _, err := version.Manifest.CheckConfig(text); err != nil {
			return instance.Instance{}, err
		}
		config := string(text)
		settings.ConfigJSON = &config
	}
	after, err := instance.UpdateSettings(ctx, tx, before, settings, m.Now)
	if err != nil {
		return instance.Instance{}, err
	}
	return after, m.recordSettings(ctx, tx, before, after)
}

// recordSettings writes the event and the audit row of a change that is no step of the lifecycle. The config itself may
// be large and is the tenant's own; that it changed is enough.
func (m Meta) recordSettings(ctx context.Context, tx db.Tx, before, after instance.Instance) error {
	if err := event.Append(ctx, tx, event.Event{
		Type: "apps.instance.changed", Subject: after.ID, ResourceVersion: after.ResourceVersion, OrgID: after.OrgID,
		ProjectID:     after.ProjectID,
		CorrelationID: m.CorrelationID, TraceID: m.TraceID, At: m.Now,
		Data: map[string]any{"requested_by": m.Principal.Actor()},
	}); err != nil {
		return err
	}
	return event.Audit(ctx, tx, event.AuditRow{
		Actor: m.Principal.Actor(), Action: "apps.instance.change", ResourceType: resourceInstance,
		ResourceID: after.ID,
		OrgID:      after.OrgID, ProjectID: after.ProjectID, CorrelationID: m.CorrelationID, At: m.Now,
		Before: map[string]any{"display_name": before.DisplayName}, After: map[string]any{
			"display_name":   after.DisplayName,
			"config_changed": after.ConfigJSON != before.ConfigJSON,
		},
	})
}
