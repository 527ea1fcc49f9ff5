package state_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ed25519"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/agent/spool/spooltest"
	"github.com/gpuaas/gpuaas/protocol"
)

const victimEnv = "GPUAAS_STATE_TEST_VICTIM"

func TestMain(m *testing.M) {
	if dir := os.Getenv(victimEnv); dir != "" {
		victim(dir)
		return
	}
	if dir := os.Getenv(alteredEnv); dir != "" {
		alteredAgent(dir)
		return
	}
	os.Exit(m.Run())
}

// victimMesh has fixed keys, so that parent and child sign alike.
func victimMesh(t testing.TB) *mesh {
	t.Helper()
	key := func(b byte) ed25519.PrivateKey { return ed25519.NewKeyFromSeed(bytes.Repeat([]byte{b}, 32)) }
	m := &mesh{t: t, root: key(1), state: key(2), lease: key(3), node: key(4), epoch: 1}
	b, err := protocol.VerifyBundle(m.bundleEnvelope(1), protocol.Fingerprint(pub(m.root)))
	require.NoError(t, err)
	m.bundle = b
	return m
}

// die lets the mesh's helpers run outside a test.
type die struct{ testing.TB }

func (die) Helper()                  {}
func (die) Context() context.Context { return context.Background() }
func (die) Errorf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format, args...)
	os.Exit(3)
}
func (die) FailNow() { os.Exit(3) }

// victim works until it is killed, and says each thing only after the store has promised it.
func victim(dir string) {
	t := die{}
	m := victimMesh(t)
	s, err := state.Open(dir, state.Options{MinFreeBytes: 1})
	require.NoError(t, err)
	require.NoError(t, m.resume(s))
	require.NoError(t, s.Identify(nodeID, protocol.NewEd25519Signer(m.node)))
	if !s.Bundle().Valid() {
		require.NoError(t, s.InitBundle(m.bundle))
	}
	out := bufio.NewWriter(os.Stdout)
	promise := func(format string, args ...any) {
		_, _ = fmt.Fprintf(out, format+"\n", args...)
		_ = out.Flush()
	}
	at := noon
	if last := s.LastStamp(); !last.At.IsZero() {
		at = last.At
	}
	for g := s.Accepted().Generation + 1; ; g++ {
		v, parts := m.desired(g, workload("a", g), workload("b", 1))
		require.NoError(t, s.AcceptState(v, parts))
		promise("generation %d", g)
		require.NoError(t, s.AcceptLeases(m.leases(s.Incarnation(), lease("a", g))))
		promise("lease %d", g)
		run := fmt.Sprintf("r%d", g)
		require.NoError(t, s.OpenRun(state.Run{ID: run, MemberID: "a", OpenedAt: at}))
		promise("run %s", run)
		started := at
		for range 4 {
			at = at.Add(10 * time.Second)
			require.NoError(t,
				s.SaveSample(meter.Observation{At: at, Runs: []meter.Run{{
					RunID: run, MemberID: "a", StartedAt: started,
					Up: true,
				}}},
					clock.Stamp{At: at}))
		}
		require.NoError(t,
			s.SaveSample(meter.Observation{At: at, Runs: []meter.Run{{
				RunID: run, MemberID: "a", StartedAt: started,
				ExitedAt: at,
			}}},
				clock.Stamp{At: at}))
		require.NoError(t, s.CloseRun(run))
		promise("sealed %d", s.Spool().LastSegment)
		if g%7 == 0 {
			require.NoError(t, s.AcknowledgeUsage(spool.HubProgress{
				Incarnation: s.Incarnation(), Posted: s.Spool().LastSegment / 2,
				Archived: s.Spool().LastSegment / 3,
			}))
		}
	}
}

// TestLaw05NothingPromisedIsLostByAKill kills a process that writes, at random moments, over and over on the same
// store.
func TestLaw05NothingPromisedIsLostByAKill(t *testing.T) {
	m, dir := victimMesh(t), t.TempDir()
	rounds := 12
	if testing.Short() {
		rounds = 3
	}
	for range rounds {
		said := runVictim(t, dir, rand.IntN(60)+1)
		s := open(t, dir, m)
		checkPromised(t, s, said)
		checkChain(t, s, m)
		require.NoError(t, s.Close())
	}
}

// checkPromised checks that the store has what a victim has said.
func checkPromised(t *testing.T, s *state.Store, said string) {
	t.Helper()
	var generation, leaseNo, sealed uint64
	for line := range strings.Lines(said) {
		switch kind, value, _ := strings.Cut(strings.TrimSpace(line), " "); kind {
		case "generation":
			_, _ = fmt.Sscan(value, &generation)
		case "lease":
			_, _ = fmt.Sscan(value, &leaseNo)
		case "sealed":
			_, _ = fmt.Sscan(value, &sealed)
		}
	}
	require.GreaterOrEqual(t, s.Accepted().Generation, generation)
	require.NotNil(t, s.Accepted().Parts)
	for _, p := range s.Accepted().Parts {
		require.NotNil(t, p.Workload)
	}
	require.GreaterOrEqual(t, s.Leases()["a"].GetLeaseNo(), leaseNo)
	require.GreaterOrEqual(t, s.Spool().LastSegment, sealed)
}

// checkChain reads all that is unsent, in order and signed, and checks that its seconds neither overlap nor leave a
// gap.
func checkChain(t *testing.T, s *state.Store, m *mesh) {
	t.Helper()
	var chain *spool.Chain
	end := map[string]time.Time{}
	for number := s.Spool().Marks.Posted + 1; ; number++ {
		env, err := s.Segment(number)
		require.NoError(t, err)
		if env == nil {
			return
		}
		v, err := protocol.VerifySegment(env, pub(m.node))
		require.NoError(t, err)
		seg := v.Message()
		if chain == nil {
			chain = &spool.Chain{
				NodeID: nodeID, Incarnation: s.Incarnation(), Number: seg.GetNumber() - 1,
				SHA256: seg.GetPreviousSha256(), Sequence: seg.GetRecords()[0].GetSequence() - 1,
			}
		}
		_, next, err := spooltest.VerifyNext(*chain, env.GetPayload())
		require.NoError(t, err)
		chain = &next
		for _, r := range seg.GetRecords() {
			key := r.GetRunId() + r.GetMeter()
			if before, seen := end[key]; seen {
				require.Equal(t, before, r.GetStartedAt().AsTime(), "no gap, no overlap within a run")
			}
			end[key] = r.GetEndedAt().AsTime()
		}
	}
}

// runVictim starts one, kills it after so many lines, and returns what it said.
func runVictim(t *testing.T, dir string, lines int) string {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), victimEnv+"="+dir)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var said strings.Builder
	scanner := bufio.NewScanner(stdout)
	for range lines {
		if !scanner.Scan() {
			break
		}
		said.WriteString(scanner.Text() + "\n")
	}
	require.NoError(t, cmd.Process.Kill())
	for scanner.Scan() {
		said.WriteString(scanner.Text() + "\n")
	}
	_ = cmd.Wait()
	require.Empty(t, stderr.String())
	return said.String()
}

// The next process must not measure again what was cut before.
func TestLaw05AnIntervalGoesOnWhereItWasCut(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	require.NoError(t, s.OpenRun(state.Run{ID: "r", MemberID: "a", OpenedAt: noon}))
	run := meter.Run{RunID: "r", MemberID: "a", StartedAt: noon.Add(time.Second), Up: true}
	sample := func(seconds int) {
		t.Helper()
		at := noon.Add(time.Duration(seconds) * time.Second)
		require.NoError(t, s.SaveSample(meter.Observation{At: at, Runs: []meter.Run{run}, CutEvery: 20 * time.Second},
			clock.Stamp{At: at}))
	}
	for seconds := 5; seconds <= 45; seconds += 10 {
		sample(seconds)
	}
	cut := s.Spool().LastSegment
	require.Positive(t, cut)
	require.NoError(t, s.Close())
	s = open(t, dir, m)
	run.Up, run.ExitedAt = false, noon.Add(50*time.Second)
	sample(55)
	require.Greater(t, s.Spool().LastSegment, cut)
	checkChain(t, s, m)
}

// A process died after it created a file of Badger and before it allocated it.
func TestAnEmptyMemtableThatAKilledProcessLeftIsNoObstacle(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	use(t, s, "a", "r1", 60)
	before := s.Spool()
	require.NoError(t, s.Close())
	require.NoError(t, os.WriteFile(filepath.Join(dir, "00099.mem"), nil, 0o600))
	require.Equal(t, before, open(t, dir, m).Spool())
}

func (m *machine) DeliverSecrets(context.Context, string, map[string][]byte, *protocol.Secrets) error {
	return nil
}
