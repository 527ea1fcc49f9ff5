package command

import (
	"context"
	"maps"
	"regexp"
	"slices"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

var secretName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$`)

// CreateSecret gives a project a secret. A revoked one of that name is active again, with its next version.
func (s *Service) CreateSecret(ctx context.Context, m Meta, projectID, name, value string) (secret.Secret, error) {
	check := access.Project(m.Principal, iam.SecretManage, projectID)
	return once(ctx, s, m, check, func(tx db.Tx, project iam.Project) (secret.Secret, error) {
		if !secretName.MatchString(name) {
			return secret.Secret{}, fault.New(fault.Unprocessable, fault.CodeInvalid, "The secret cannot be stored.", nil).
				WithField("/name", "must match "+secretName.String()).Permanent()
		}
		before, err := secret.ByName(ctx, tx, project.ID, name)
		switch {
		case fault.Is(err, fault.NotFound):
			before = secret.Secret{
				ID: db.NewID(), OrgID: project.OrgID, ProjectID: project.ID, Name: name, CreatedAt: m.Now,
			}
		case err != nil:
			return secret.Secret{}, err
		case before.Status == secret.StatusActive:
			return secret.Secret{}, fault.New(fault.Conflict, codeSecretExists, "The project has a secret of this name; "+
				"rotate it to give it another value.", nil).WithField("/name", "is taken").Permanent()
		}
		before.Status, before.Version = secret.StatusActive, before.Version+1
		return s.putSecret(ctx, tx, m, before, value, "apps.secret.issued")
	})
}

// RotateSecret gives a secret another value, which reaches the instances that refer to it.
func (s *Service) RotateSecret(ctx context.Context, m Meta, projectID, id, value string) (secret.Secret, error) {
	check := secretToChange(m, projectID, id)
	v, err := once(ctx, s, m, check, func(tx db.Tx, before secret.Secret) (secret.Secret, error) {
		if before.Status == secret.StatusRevoked {
			return secret.Secret{}, fault.New(fault.Conflict, codeSecretRevoked, "The secret is revoked; create it anew.",
				nil).Permanent()
		}
		before.Version++
		return s.putSecret(ctx, tx, m, before, value, "apps.secret.rotated")
	})
	if err == nil {
		failpoint.Hit("hub/secret/committed")
	}
	return v, err
}

// RevokeSecret destroys the value of a secret: instances that refer to it get an empty one. A revoked one stays as it
// is.
func (s *Service) RevokeSecret(ctx context.Context, m Meta, projectID, id string) (secret.Secret, error) {
	return once(ctx, s, m, secretToChange(m, projectID, id), func(tx db.Tx, before secret.Secret) (secret.Secret, error) {
		if before.Status == secret.StatusRevoked {
			return before, nil
		}
		before.Status, before.Version = secret.StatusRevoked, before.Version+1
		return s.putSecret(ctx, tx, m, before, "", "apps.secret.revoked")
	})
}

func secretToChange(m Meta, projectID, id string) access.Check[secret.Secret] {
	inProject := access.Project(m.Principal, iam.SecretManage, projectID)
	return func(ctx context.Context, tx db.Tx) (secret.Secret, error) {
		project, err := inProject(ctx, tx)
		if err != nil {
			return secret.Secret{}, err
		}
		return secret.Get(ctx, tx, project.ID, id)
	}
}

// putSecret stores a secret with its value, and seals that anew for each member that refers to it.
func (s *Service) putSecret(ctx context.Context, tx db.Tx, m Meta, v secret.Secret, value, event string,
) (secret.Secret, error) {
	v.ResourceVersion, v.UpdatedAt = v.ResourceVersion+1, m.Now
	sealed, err := []byte{}, error(nil)
	if v.Status == secret.StatusActive {
		if sealed, err = s.Sealer.Seal([]byte(value), v.AAD()); err != nil {
			return v, err
		}
	}
	if err := secret.Put(ctx, tx, v, sealed); err != nil {
		return v, err
	}
	nodes, err := deliverEverywhere(ctx, tx, v.ID, []byte(value))
	if err != nil {
		return v, err
	}
	failpoint.Hit("hub/secret/sealed")
	for _, nodeID := range nodes {
		if err := fleet.BumpIntent(ctx, tx, nodeID); err != nil {
			return v, err
		}
	}
	return v, change.Record(ctx, tx, m.by(), change.Entry{
		Event:        event,
		Action:       iam.SecretManage,
		ResourceType: resourceSecret,
		ResourceID:   v.ID,
		Version:      v.ResourceVersion,
		OrgID:        v.OrgID,
		ProjectID:    v.ProjectID,
		Data:         map[string]any{"name": v.Name, "version": v.Version},
		After:        map[string]any{"name": v.Name, "version": v.Version, "status": v.Status},
	})
}

// deliverEverywhere seals the newest value of a secret for each member that refers to it, and returns their nodes,
// sorted. A node that shows no key to seal to any more delays no other: its members get a value that does not open, and
// fail with secret_unreadable rather than keep the old one.
func deliverEverywhere(ctx context.Context, tx db.Tx, secretID string, value []byte) (nodeIDs []string, err error) {
	deliveries, err := secret.Deliveries(ctx, tx, secretID)
	if err != nil {
		return nil, err
	}
	keys := map[string]protocol.Verified[*protocol.SealingKey]{}
	for _, d := range deliveries {
		key, known := keys[d.NodeID]
		if !known {
			if key, err = change.SealingKey(ctx, tx, d.NodeID); err != nil && !capacity.IsFeatureMissing(err) {
				return nil, err
			}
			keys[d.NodeID] = key
		}
		sealed := secret.Unreadable()
		if key.OK() {
			if sealed, err = protocol.Seal(key, d.MemberID, d.Parameter, value); err != nil {
				return nil, err
			}
		}
		if err := secret.Deliver(ctx, tx, d, sealed); err != nil {
			return nil, err
		}
	}
	return slices.Sorted(maps.Keys(keys)), nil
}

// deliverSecrets seals, for a member, the secrets that its parameters refer to. What is sealed for it already stays.
func (s *Service) deliverSecrets(ctx context.Context, tx db.Tx, m manifest.Manifest, parametersJSON string,
	to sealFor, key protocol.Verified[*protocol.SealingKey],
) error {
	for parameter, name := range protocol.SecretReferences(parametersJSON) {
		refused := func(reason string) error {
			return fault.New(fault.Unprocessable, codeSecretUnknown, "A parameter refers to a secret that cannot be "+
				"delivered.", nil).WithField("/parameters/"+parameter, reason).Permanent()
		}
		if !m.IsSecret(parameter) || m.HasIdentity() && parameter == protocol.InstanceIdentityParameter {
			return refused("is not secret: only a writeOnly parameter may refer to a secret")
		}
		v, err := secret.ByName(ctx, tx, to.projectID, name)
		switch {
		case fault.Is(err, fault.NotFound):
			return refused("names no secret of the project")
		case err != nil:
			return err
		case v.Status == secret.StatusRevoked:
			return refused("names a secret that is revoked")
		}
		d := secret.Delivery{
			MemberID: to.memberID, Parameter: parameter, SecretID: v.ID, InstanceID: to.instanceID, NodeID: to.nodeID,
		}
		if done, err := secret.IsDelivered(ctx, tx, d); err != nil || done {
			if err != nil {
				return err
			}
			continue
		}
		sealed, err := secret.SealedValue(ctx, tx, v.ID)
		if err != nil {
			return err
		}
		value, err := s.Sealer.Open(sealed, v.AAD())
		if err != nil {
			return err
		}
		if sealed, err = protocol.Seal(key, to.memberID, parameter, value); err != nil {
			return err
		}
		if err := secret.Deliver(ctx, tx, d, sealed); err != nil {
			return err
		}
	}
	return nil
}
