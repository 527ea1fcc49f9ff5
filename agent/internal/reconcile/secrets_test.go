package reconcile_test

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/protocol"
)

const plantedSecret = "correct-horse-battery"

// sealedWorkload is a workload with a secret parameter, which is sealed to the node for the member of that id.
func (f *fixture) sealedWorkload(key protocol.Verified[*protocol.SealingKey], memberID string) *protocol.Workload {
	f.t.Helper()
	f.hub.withSecret = true
	defer func() { f.hub.withSecret = false }()
	w := f.hub.workload(`{}`)
	if memberID == "" {
		memberID = w.GetId()
	}
	f.sealToken(w, key, memberID, plantedSecret)
	return w
}

// sealToken gives a workload a secret parameter.
func (f *fixture) sealToken(w *protocol.Workload, key protocol.Verified[*protocol.SealingKey], memberID, value string) {
	f.t.Helper()
	sealed, err := protocol.Seal(key, memberID, "token", []byte(value))
	require.NoError(f.t, err)
	params, err := json.Marshal(map[string]any{"token": protocol.SealedValue(sealed)})
	require.NoError(f.t, err)
	w.ParametersJson = string(params)
}

// token is the secret parameter as a running container of the workload reads it; empty while none does.
func (f *fixture) token(w *protocol.Workload) string {
	f.t.Helper()
	for _, c := range f.containersOf(w.GetId()) {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/run/gpuaas-parameters/token", c.PID))
		if err == nil && c.PID != 0 {
			return string(text)
		}
	}
	return ""
}

// A change of a secret parameter reaches a running app as its manifest says. The demo reads its config anew on SIGHUP.
func TestANewSecretReachesTheAppAsItsManifestSays(t *testing.T) {
	for onChange, want := range map[string]struct{ replaced, signalled bool }{
		"":                                    {replaced: true, signalled: true},
		"{on_change: restart}":                {replaced: true, signalled: true},
		"{on_change: none}":                   {},
		"{on_change: signal, signal: SIGHUP}": {signalled: true},
	} {
		t.Run(onChange, func(t *testing.T) {
			f := newFixture(t)
			key := f.withSealingKey()
			f.hub.onChange, f.hub.configJSON, f.hub.secretsOnChange = "none", `{"motto":"old"}`, onChange
			w := f.sealedWorkload(key, "")
			f.push(w)
			f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
			require.Equal(t, plantedSecret, f.token(w))
			pid := f.container(w.GetId()).PID

			next := proto.CloneOf(w)
			next.Services[0].Config.Json = `{"motto":"new"}`
			f.sealToken(next, key, w.GetId(), "rotated")
			f.push(next)
			require.Eventually(t, func() bool { return f.token(w) == "rotated" }, time.Minute, 10*time.Millisecond)
			s := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
			require.Equal(t, want.replaced, f.container(w.GetId()).PID != pid)
			if want.signalled {
				require.Eventually(t, func() bool { return configOf(t, s).Loaded == `{"motto":"new"}` }, time.Minute,
					10*time.Millisecond)
			} else {
				require.JSONEq(t, `{"motto":"old"}`, configOf(t, s).Loaded)
			}
			require.Zero(t, s.GetRestarts(), "a new secret is no failure")
			f.restart()
			f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
			require.Equal(t, "rotated", f.token(w), "an agent's restart leaves it")
			f.push()
			f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
		})
	}
}

// withSealingKey starts the agent again with the key of its node, and returns that key as a hub has it.
func (f *fixture) withSealingKey() protocol.Verified[*protocol.SealingKey] {
	f.t.Helper()
	f.stop()
	pair, err := protocol.DeriveSealingKey(nodeID, f.hub.node.Seed())
	require.NoError(f.t, err)
	env, err := pair.Sign(protocol.NewEd25519Signer(f.hub.node))
	require.NoError(f.t, err)
	key, err := protocol.VerifySealingKey(env, nodeID, f.hub.node.Public().(ed25519.PublicKey))
	require.NoError(f.t, err)
	f.configure = func(c *reconcile.Config) { c.Unseal = pair.Open }
	f.start()
	return key
}

// The container reads a secret parameter; the agent writes it to no file outside memory, and opens none that was sealed
// for another member.
func TestLaw11ASecretParameterIsOnlyInMemory(t *testing.T) {
	f := newFixture(t)
	key := f.withSealingKey()

	w, foreign := f.sealedWorkload(key, ""), f.sealedWorkload(key, "another member")
	f.push(w, foreign)
	refused := f.untilStatus(foreign.GetId(), protocol.WorkloadStatus_FAILED)
	require.Equal(t, protocol.WorkloadStatus_SECRET_UNREADABLE, refused.GetReason())
	require.Contains(t, refused.GetDetail(), "token")
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	read := func() string { return f.token(w) }
	require.Equal(t, plantedSecret, read())
	before := f.container(w.GetId())
	f.restart()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, before.PID, f.container(w.GetId()).PID)
	require.NoError(t, unix.Kill(int(before.PID), unix.SIGKILL))
	require.Eventually(t, func() bool {
		c := f.containersOf(w.GetId())
		return len(c) == 1 && c[0].ID != before.ID && c[0].PID != 0
	}, 30*time.Second, 10*time.Millisecond)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, plantedSecret, read(), "a new container gets it from the accepted state")

	f.stop()
	sealed := 0
	require.NoError(t, filepath.WalkDir(f.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || strings.HasPrefix(path, f.dir+"/network/ns/") || onTmpfs(path) {
			return err
		}
		data, err := os.ReadFile(path)
		require.NotContains(t, string(data), plantedSecret, path)
		sealed += bytes.Count(data, []byte("$sealed"))
		return err
	}))
	require.Positive(t, sealed, "the store was searched")
	f.start()
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	mounts, err := os.ReadFile("/proc/self/mounts")
	require.NoError(t, err)
	require.NotContains(t, string(mounts), "/secrets ")
}

func onTmpfs(path string) bool {
	var s unix.Statfs_t
	return unix.Statfs(path, &s) == nil && s.Type == unix.TMPFS_MAGIC
}
