package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
)

// ChangeInstanceInput is the request; nil leaves a setting as it is.
type ChangeInstanceInput struct {
	DisplayName *string
	Config      map[string]any
}

// ChangeInstance renames an app instance or changes its config. It makes no revision. What a new config does to
// running containers is what the manifest says. It answers with the changed instance.
func (s *Service) ChangeInstance(ctx context.Context, m Meta, projectID, instanceID string,
	in ChangeInstanceInput,
) (instance.Instance, error) {
	return run(ctx, s, access.Project(m.Principal, iam.InstanceUpgrade, projectID), func(tx db.Tx,
		project iam.Project,
	) (instance.Instance, error) {
		before, err := instance.Get(ctx, tx, project.ID, instanceID)
		if err != nil {
			return instance.Instance{}, err
		}
		if err := mayOperate(m, iam.InstanceUpgrade, before); err != nil {
			return instance.Instance{}, err
		}
		settings := instance.Settings{DisplayName: in.DisplayName}
		if in.Config != nil {
			config, err := checkConfig(ctx, tx, before, in.Config)
			if err != nil {
				return instance.Instance{}, err
			}
			settings.ConfigJSON = &config
		}
		c, err := instance.UpdateSettings(ctx, tx, before, settings, m.Now)
		if err != nil {
			return instance.Instance{}, err
		}
		if err := checkMembers(ctx, tx, c, "/config"); err != nil {
			return instance.Instance{}, err
		}
		if err := change.CompleteInstance(ctx, tx, m.by(), iam.InstanceUpgrade, c); err != nil {
			return instance.Instance{}, err
		}
		return c.Instance, m.recordSettings(ctx, tx, before, c.Instance)
	})
}

// checkConfig checks a config against the version that the instance runs, and returns it as JSON.
func checkConfig(ctx context.Context, tx db.Tx, i instance.Instance, config map[string]any) (string, error) {
	text, err := object(config)
	if err != nil {
		return "", err
	}
	version, err := catalog.GetVersion(ctx, tx, i.AppSlug, i.Version)
	if err != nil {
		return "", err
	}
	_, err = version.Manifest.CheckConfig(text)
	return string(text), err
}

// recordSettings writes the event and the audit row of a change that is no step of the lifecycle. The config itself may
// be large and is the tenant's own; that it changed is enough.
func (m Meta) recordSettings(ctx context.Context, tx db.Tx, before, after instance.Instance) error {
	return change.Record(ctx, tx, m.by(), change.Entry{
		Event:        "apps.instance.changed",
		Action:       "apps.instance.change",
		ResourceType: change.Instance,
		ResourceID:   after.ID,
		Version:      after.ResourceVersion,
		OrgID:        after.OrgID,
		ProjectID:    after.ProjectID,
		Before:       map[string]any{"display_name": before.DisplayName},
		After: map[string]any{
			"display_name":   after.DisplayName,
			"config_changed": after.ConfigJSON != before.ConfigJSON,
		},
	})
}
