package command

import (
	"context"
	"encoding/json"
	"maps"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// sealFor is the member that parameters are sealed for. An instance has one.
type sealFor struct{ projectID, instanceID, nodeID, memberID string }

// seal replaces the secret parameters of an instance by what only the node of its member opens, adds the project's
// package index for an instance that has an environment, and delivers the secrets that the parameters refer to.
func (s *Service) seal(ctx context.Context, tx db.Tx, w resolvedVersion, to sealFor, environment []string,
) (resolvedVersion, error) {
	var index []byte
	var err error
	if len(environment) > 0 {
		if index, err = s.openPackageIndex(ctx, tx, to.projectID); err != nil {
			return w, err
		}
	}
	if !w.Version.Manifest.HasSecrets() && len(index) == 0 {
		return w, nil
	}
	key, err := sealingKey(ctx, tx, to.nodeID)
	if err != nil {
		return w, err
	}
	sealed, err := w.Version.Manifest.Seal([]byte(w.parametersJSON), func(name string, secret []byte) ([]byte, error) {
		return protocol.Seal(key, to.memberID, name, secret)
	})
	if err == nil && len(index) > 0 {
		if index, err = protocol.Seal(key, to.memberID, protocol.PackageIndexParameter, index); err == nil {
			sealed, err = withPackageIndex(sealed, index)
		}
	}
	if err != nil {
		return w, err
	}
	w.parametersJSON = string(sealed)
	return w, s.deliverSecrets(ctx, tx, w.Version.Manifest, w.parametersJSON, to, key)
}

// sealingKey returns the key that a node opens its secrets with.
func sealingKey(ctx context.Context, tx db.Tx, nodeID string) (protocol.Verified[*protocol.SealingKey], error) {
	node, err := fleet.Get(ctx, tx, nodeID)
	if err == nil {
		err = fleet.LoadFacts(ctx, tx, &node)
	}
	if err != nil {
		return protocol.Verified[*protocol.SealingKey]{}, err
	}
	key, err := protocol.VerifySealingKey(node.Facts.GetSealingKey(), node.ID, node.PublicKey)
	if err != nil {
		return key, capacity.FeatureMissing()
	}
	return key, nil
}

// withPackageIndex returns parameters with a sealed package index, or without one where it is nil.
func withPackageIndex(parametersJSON, sealed []byte) ([]byte, error) {
	all := map[string]any{}
	if err := json.Unmarshal(parametersJSON, &all); err != nil {
		return nil, err
	}
	delete(all, protocol.PackageIndexParameter)
	if sealed != nil {
		all[protocol.PackageIndexParameter] = protocol.SealedValue(sealed)
	}
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
