package command

import (
	"context"
	"encoding/json"
	"maps"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// sealFor is the member that parameters are sealed for. An instance has one.
type sealFor struct{ orgID, projectID, instanceID, nodeID, memberID string }

// seal replaces the secret parameters of an instance by what only the node of its member opens, delivers the secrets
// that the parameters refer to, and adds what the platform itself puts beside them: the project's package index for an
// instance that has an environment, and a reference to the service account of an instance that gets one.
func (s *Service) seal(ctx context.Context, tx db.Tx, m Meta, w resolvedVersion, to sealFor, environment []string,
) (resolvedVersion, error) {
	var index []byte
	var err error
	if len(environment) > 0 {
		if index, err = s.openPackageIndex(ctx, tx, to.projectID); err != nil {
			return w, err
		}
	}
	identity := w.Version.Manifest.HasIdentity()
	if !w.Version.Manifest.HasSecrets() && !identity && len(index) == 0 {
		return w, nil
	}
	key, err := change.SealingKey(ctx, tx, to.nodeID)
	if err != nil {
		return w, err
	}
	sealed, err := w.Version.Manifest.Seal([]byte(w.parametersJSON), func(name string, secret []byte) ([]byte, error) {
		return protocol.Seal(key, to.memberID, name, secret)
	})
	if err != nil {
		return w, err
	}
	if err := s.deliverSecrets(ctx, tx, w.Version.Manifest, string(sealed), to, key); err != nil {
		return w, err
	}
	added := map[string]any{}
	if len(index) > 0 {
		if index, err = protocol.Seal(key, to.memberID, protocol.PackageIndexParameter, index); err != nil {
			return w, err
		}
		added[protocol.PackageIndexParameter] = protocol.SealedValue(index)
	}
	if identity {
		if err := s.issueIdentity(ctx, tx, m, to); err != nil {
			return w, err
		}
		added[protocol.InstanceIdentityParameter] = protocol.IdentityReference()
	}
	sealed, err = withPlatforms(sealed, added)
	w.parametersJSON = string(sealed)
	return w, err
}

// issueIdentity gives an instance its service account. It keeps the one that it has: the hub renews that by itself.
func (s *Service) issueIdentity(ctx context.Context, tx db.Tx, m Meta, to sealFor) error {
	has, err := secret.HasIdentity(ctx, tx, to.memberID)
	if err != nil || has {
		return err
	}
	return change.IssueIdentity(ctx, tx, m.by(), change.Hub{URL: s.APIURL, CA: trust.HubCAPEM(s.Bundle())},
		secret.Identity{
			MemberID: to.memberID, InstanceID: to.instanceID, OrgID: to.orgID, ProjectID: to.projectID, NodeID: to.nodeID,
		})
}

// withPlatforms returns parameters with what the platform adds, in place of what it has added before.
func withPlatforms(parametersJSON []byte, added map[string]any) ([]byte, error) {
	all := map[string]any{}
	if err := json.Unmarshal(parametersJSON, &all); err != nil {
		return nil, err
	}
	delete(all, protocol.PackageIndexParameter)
	if protocol.IsIdentityReference(all[protocol.InstanceIdentityParameter]) {
		delete(all, protocol.InstanceIdentityParameter)
	}
	maps.Copy(all, added)
	return json.Marshal(all)
}

// keepSealed encodes the parameters of an upgrade. The secret ones that the instance has and the request does not name
// stay: nobody can read them to name them again. null removes one.
func keepSealed(params map[string]any, before string) ([]byte, error) {
	if err := manifest.RefuseSealed(params); err != nil {
		return nil, err
	}
	all := maps.Clone(params)
	for name, sealed := range protocol.SealedParameters(before) {
		switch value, named := params[name]; {
		case !named:
			all[name] = protocol.SealedValue(sealed)
		case value == nil:
			delete(all, name)
		}
	}
	return object(all)
}
