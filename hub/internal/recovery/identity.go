package recovery

import (
	"context"
	"encoding/json"
	"maps"
	"math"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// references returns a workload that refers to secrets of its project, and to the service account of its instance,
// again: what is sealed for the node is kept as delivered, so that a rotation reaches it.
func (a adopter) references(ctx context.Context, tx db.Tx, w *protocol.Workload) (*protocol.Workload, error) {
	w = proto.CloneOf(w)
	for _, of := range []*protocol.Workload{w.GetFallback(), w} {
		if of == nil {
			continue
		}
		sealed, refer := protocol.SealedParameters(of.GetParametersJson()), map[string]any{}
		for _, r := range of.GetSecretReferences() {
			if value := sealed[r.GetParameter()]; value != nil {
				if err := a.secret(ctx, tx, w, r, value); err != nil {
					return nil, err
				}
				refer[r.GetParameter()] = map[string]any{protocol.SecretReferenceKey: r.GetName()}
			}
		}
		m, _ := manifest.Parse(of.GetManifest().GetPayload())
		if value := sealed[protocol.InstanceIdentityParameter]; value != nil && m.HasIdentity() {
			if err := a.identity(ctx, tx, w, value); err != nil {
				return nil, err
			}
			refer[protocol.InstanceIdentityParameter] = protocol.IdentityReference()
		}
		var err error
		if of.ParametersJson, err = withReferences(of.GetParametersJson(), refer); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// identity keeps the sealed service account only until the hub has issued another: the rows know neither that account
// nor its key.
func (a adopter) identity(ctx context.Context, tx db.Tx, w *protocol.Workload, sealed []byte) error {
	return secret.PutIdentity(ctx, tx, secret.Identity{
		MemberID: w.GetId(), InstanceID: w.GetInstanceId(), OrgID: w.GetOrgId(), ProjectID: w.GetProjectId(),
		NodeID: a.b.NodeID, RenewAt: a.by.Now,
	}, sealed)
}

// secret keeps a sealed value as that of the project's secret of its name.
func (a adopter) secret(ctx context.Context, tx db.Tx, w *protocol.Workload, r *protocol.SecretReference, sealed []byte,
) error {
	of, known, err := secret.Adopt(ctx, tx, secret.Secret{
		ID: db.NewID(), OrgID: w.GetOrgId(), ProjectID: w.GetProjectId(), Name: r.GetName(),
		Version: int64(min(r.GetVersion(), math.MaxInt64)), UpdatedAt: a.by.Now,
	})
	if err != nil {
		return err
	}
	if err := secret.Deliver(ctx, tx, secret.Delivery{
		MemberID: w.GetId(), Parameter: r.GetParameter(), SecretID: of.ID, InstanceID: w.GetInstanceId(),
		NodeID: a.b.NodeID,
	}, sealed); err != nil || known {
		return err
	}
	return a.addFinding(ctx, tx, finding.Secret, resourceSecret, of.ID, "Version %d of the secret %s %s, and no other "+
		"instance can get its value: create the secret anew.", of.Version, of.Name, madeAfter)
}

func withReferences(parametersJSON string, refer map[string]any) (string, error) {
	if len(refer) == 0 {
		return parametersJSON, nil
	}
	all := map[string]any{}
	if err := json.Unmarshal([]byte(parametersJSON), &all); err != nil {
		return "", err
	}
	maps.Copy(all, refer)
	out, err := json.Marshal(all)
	return string(out), err
}
