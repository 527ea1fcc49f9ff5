package recovery

import (
	"context"
	"encoding/json"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// identity returns a workload that refers to the service account of its instance again, and keeps the sealed one only
// until the hub has issued another: the rows know neither that account nor its key.
func (a adopter) identity(ctx context.Context, tx db.Tx, w *protocol.Workload) (*protocol.Workload, error) {
	w = proto.CloneOf(w)
	for _, of := range []*protocol.Workload{w.GetFallback(), w} {
		m, _ := manifest.Parse(of.GetManifest().GetPayload())
		sealed := protocol.SealedParameters(of.GetParametersJson())[protocol.InstanceIdentityParameter]
		if sealed == nil || !m.HasIdentity() {
			continue
		}
		var err error
		if of.ParametersJson, err = withIdentityReference(of.GetParametersJson()); err != nil {
			return nil, err
		}
		if err := secret.PutIdentity(ctx, tx, secret.Identity{
			MemberID: w.GetId(), InstanceID: w.GetInstanceId(), OrgID: w.GetOrgId(), ProjectID: w.GetProjectId(),
			NodeID: a.b.NodeID, RenewAt: a.by.Now,
		}, sealed); err != nil {
			return nil, err
		}
	}
	return w, nil
}

func withIdentityReference(parametersJSON string) (string, error) {
	all := map[string]any{}
	if err := json.Unmarshal([]byte(parametersJSON), &all); err != nil {
		return "", err
	}
	all[protocol.InstanceIdentityParameter] = protocol.IdentityReference()
	out, err := json.Marshal(all)
	return string(out), err
}
