package e2e_test

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
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/e2e/leakcheck"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/protocol"
)

// beat is the agents' beat in these tests: how far the bill may be from the truth, in the tenant's favour.
const beat = time.Second

// Law 9, and the whole way: create, running, metered, billed, decommissioned.
func TestLaw09DecommissionLeavesNothingAndTheBillIsTheTruth(t *testing.T) {
	w := onlyWorld(t).platform()
	scope := w.scope()
	scope.ContainerdAddress, scope.KeepImages = w.containerd.Address, true
	scope.IgnoreFiles = append(scope.IgnoreFiles, w.dir) // databases, logs and the image store grow
	// A first instance brings the cached image and the bridge's first start; what it leaves is the state to return to.
	first := w.launch("first")
	w.decommission(first)

	before, err := leakcheck.Take(scope)
	require.NoError(t, err)
	containers := w.listen(w.agent.Config.ContainerdNamespace)
	second := w.launch("second")
	w.answers(second)
	_, err = w.tenant.AwaitCharge(w.ctx, second.ID)
	require.NoError(t, err)
	ended := w.decommission(second)
	require.Equal(t, client.AppInstanceStatusDecommissioned, ended.Status)

	w.eventually("nothing is left on the node", func() error {
		after, err := leakcheck.Take(scope)
		if err != nil {
			return err
		}
		return differs(leakcheck.Diff(before, after))
	})

	// The hold is returned only after the node's last record is posted: then the bill is final.
	var postings []client.Posting
	w.eventually("the bill is final", func() (err error) {
		postings, err = w.tenant.Postings(w.ctx, second.ID)
		return orMissing(err, hasKind(postings, client.PostingKindHoldClosed))
	})
	ran := containers.running(t)
	usage, err := w.tenant.Usage(w.ctx, second.ID)
	require.NoError(t, err)
	seconds := requireContiguous(t, usage, "session_seconds")
	requireWithinBeat(t, ran, seconds)
	paid := debit(t, postings)
	require.Equal(t, 1, paid.Sign())
	// 3.60 an hour is a tenth of a cent a second, rounded to a billionth once.
	want := new(big.Rat).Mul(seconds, big.NewRat(1, 1000))
	off := new(big.Rat).Sub(paid, want)
	require.LessOrEqual(t, off.Abs(off).Cmp(big.NewRat(1, 1_000_000_000)), 0, "paid %s for %s s", paid.FloatString(9),
		seconds.FloatString(6))

	require.Equal(t, seconds.RatString(), w.signedSeconds(second).RatString(), "what the node signed is what was billed")

	events, err := w.tenant.Events(w.ctx, w.operator, second.ID)
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
func (w *world) signedSeconds(i client.AppInstance) *big.Rat {
	w.t.Helper()
	raw, err := os.ReadFile(filepath.Join(w.agent.Config.DataDir(), "node.crt"))
	require.NoError(w.t, err)
	block, _ := pem.Decode(raw)
	require.NotNil(w.t, block)
	certificate, err := x509.ParseCertificate(block.Bytes)
	require.NoError(w.t, err)
	key, ok := certificate.PublicKey.(ed25519.PublicKey)
	require.True(w.t, ok)
	out, err := devcluster.ExportUsage(w.ctx, w.hub.Config, w.agent.Ready.NodeID)
	require.NoError(w.t, err)
	micros := int64(0)
	for line := range bytes.Lines(out) {
		var segment struct {
			Envelope []byte `json:"envelope"`
		}
		require.NoError(w.t, json.Unmarshal(line, &segment))
		env := &protocol.Envelope{}
		require.NoError(w.t, proto.Unmarshal(segment.Envelope, env))
		v, err := protocol.VerifySegment(env, key)
		require.NoError(w.t, err)
		for _, r := range v.Message().GetRecords() {
			if r.GetMemberId() == i.Members[0].ID && r.GetMeter() == protocol.MeterSessionSeconds {
				micros += r.GetQuantity()
			}
		}
	}
	return big.NewRat(micros, 1_000_000)
}

// requireWithinBeat holds billed seconds against the time that containerd saw: never more, and less by one beat at
// most.
func requireWithinBeat(t *testing.T, ran time.Duration, seconds *big.Rat) {
	t.Helper()
	truth := big.NewRat(ran.Microseconds(), 1_000_000)
	// Containerd's start event is written some milliseconds after the process has started.
	slack := big.NewRat(250, 1000)
	least := new(big.Rat).Sub(truth, big.NewRat(beat.Microseconds(), 1_000_000))
	require.GreaterOrEqual(t, seconds.Cmp(new(big.Rat).Sub(least, slack)), 0, "billed %s s of %s", seconds.FloatString(3),
		ran)
	require.LessOrEqual(t, seconds.Cmp(new(big.Rat).Add(truth, slack)), 0, "billed %s s of %s", seconds.FloatString(3),
		ran)
}

func (w *world) decommission(i client.AppInstance) client.AppInstance {
	w.t.Helper()
	ended, err := w.tenant.Decommission(w.ctx, w.operator, i.ID)
	require.NoError(w.t, err)
	return ended
}
