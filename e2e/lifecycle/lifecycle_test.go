package lifecycle_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 9, and the whole way: create, running, metered, billed, decommissioned.
func TestLaw09DecommissionLeavesNothingAndTheBillIsExact(t *testing.T) {
	w := harness.NewAlone(t).SetUpPlatform()
	scope := w.Scope()
	scope.ContainerdAddress, scope.KeepImages = w.Containerd.Address, true
	scope.IgnoreFiles = append(scope.IgnoreFiles, w.Dir) // databases, logs and the image store grow
	// The first instance caches the image and makes the bridge; what it leaves is the state to return to.
	first := w.Launch("first")
	w.Decommission(first)

	before, err := leakcheck.Take(scope)
	require.NoError(t, err)
	containers := w.WatchContainerd(w.Agent.Config.ContainerdNamespace)
	second := w.Launch("second")
	w.RequireAnswer(second)
	_, err = w.Tenant.AwaitCharge(w.Ctx, second.ID)
	require.NoError(t, err)
	ended := w.Decommission(second)
	require.Equal(t, client.AppInstanceStatusDecommissioned, ended.Status)

	w.Eventually("nothing is left on the node", func() error {
		after, err := leakcheck.Take(scope)
		if err != nil {
			return err
		}
		return harness.DifferenceError(leakcheck.Diff(before, after))
	})

	postings := w.FinalPostings(second)
	usage, err := w.Tenant.Usage(w.Ctx, second.ID)
	require.NoError(t, err)
	seconds := harness.RequireContiguous(t, usage)
	containers.RequireBill(t, "", seconds)
	w.RequireNoFilesOf(second)
	paid := harness.UsageCost(t, postings)
	require.Equal(t, 1, paid.Sign())
	harness.RequireCost(t, postings, seconds, 1)
	require.Equal(t, seconds.RatString(), signedSeconds(w, second).RatString(), "what the node signed is what was billed")

	events, err := w.Tenant.Events(w.Ctx, w.Operator, second.ID)
	require.NoError(t, err)
	var types []string
	for _, e := range events {
		types = append(types, e.Type)
		require.NotEmpty(t, e.Data.CorrelationID)
	}
	require.Equal(t, []string{
		"apps.instance.requested", "apps.instance.deploying", "apps.instance.running",
		"apps.instance.decommission_requested", "apps.instance.decommissioned",
	}, types)
}

// signedSeconds sums the session time of an instance in the segments that the hub exports, each verified with the
// node's key.
func signedSeconds(w *harness.Testbed, i client.AppInstance) *big.Rat {
	w.T.Helper()
	raw, err := os.ReadFile(filepath.Join(w.Agent.Config.DataDir(), "node.crt"))
	require.NoError(w.T, err)
	block, _ := pem.Decode(raw)
	require.NotNil(w.T, block)
	certificate, err := x509.ParseCertificate(block.Bytes)
	require.NoError(w.T, err)
	key, ok := certificate.PublicKey.(ed25519.PublicKey)
	require.True(w.T, ok)
	out, err := devcluster.ExportUsage(w.Ctx, w.Hub.Config, w.Agent.Ready.NodeID)
	require.NoError(w.T, err)
	micros := int64(0)
	for line := range bytes.Lines(out) {
		var segment struct {
			Envelope []byte `json:"envelope"`
		}
		require.NoError(w.T, json.Unmarshal(line, &segment))
		env := &protocol.Envelope{}
		require.NoError(w.T, proto.Unmarshal(segment.Envelope, env))
		v, err := protocol.VerifySegment(env, key)
		require.NoError(w.T, err)
		for _, r := range v.Message().GetRecords() {
			if r.GetMemberId() == i.Members[0].ID && r.GetMeter() == protocol.MeterSessionSeconds {
				micros += r.GetQuantity()
			}
		}
	}
	return big.NewRat(micros, 1_000_000)
}
