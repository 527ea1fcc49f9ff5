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
	"strconv"
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

// victimOf is a process that works on a store until it is killed, and says each thing only after the store has promised
// it.
type victimOf struct {
	die

	mesh *mesh
	s    *state.Store
	at   time.Time
	open map[string]time.Time
}

// victim does random things until it is killed.
func victim(dir string) {
	v := victimOf{mesh: victimMesh(die{}), at: noon, open: map[string]time.Time{}}
	var err error
	v.s, err = state.Open(dir, state.Options{MinFreeBytes: 1})
	require.NoError(v, err)
	require.NoError(v, v.mesh.resume(v.s))
	require.NoError(v, v.s.Identify(nodeID, protocol.NewEd25519Signer(v.mesh.node)))
	if !v.s.Bundle().Valid() {
		require.NoError(v, v.s.InitBundle(v.mesh.bundle))
	}
	v.mesh.bundle, v.mesh.epoch = v.s.Bundle(), v.s.Bundle().Epoch()
	if last := v.s.LastStamp(); !last.At.IsZero() {
		v.at = last.At
	}
	for id, run := range v.s.Runs() {
		v.open[id] = run.OpenedAt
		if v.s.Measured(id) { // its last sample was stored before the kill, or none
			v.close()
		}
	}
	v.accept()
	for {
		switch rand.IntN(16) {
		case 0:
			v.beginEpoch()
		case 1, 2:
			v.accept()
		case 3, 4:
			n := v.s.Leases()["a"].GetLeaseNo() + 1
			require.NoError(v, v.s.AcceptLeases(v.mesh.leases(v.s.Incarnation(), lease("a", n))))
			promise("lease %d", n)
		case 5, 6:
			v.acknowledge()
		case 7, 8:
			v.end()
		default:
			v.use()
		}
	}
}

func promise(format string, args ...any) { _, _ = fmt.Printf(format+"\n", args...) }

// beginEpoch accepts the bundle of another epoch, in which the order of states begins again.
func (v *victimOf) beginEpoch() {
	v.mesh.epoch++
	next, err := v.mesh.bundle.Succeed(v.mesh.bundleEnvelope(v.mesh.bundle.Version() + 1))
	require.NoError(v, err)
	v.mesh.bundle = next
	require.NoError(v, v.s.AcceptBundle(next.Envelope()))
	promise("bundle %d", next.Version())
	v.accept()
}

func (v *victimOf) accept() {
	g := uint64(1)
	if have := v.s.Accepted(); have.Epoch == v.mesh.epoch {
		g = have.Generation + 1
	}
	desired, parts := v.mesh.desired(g, workload("a", g), workload("b", 1))
	require.NoError(v, v.s.AcceptState(desired, parts))
	promise("state %d", orderOf(v.mesh.epoch, g))
}

// orderOf is the place of a state in the order of states, as one number.
func orderOf(epoch, generation uint64) uint64 { return epoch<<32 | generation }

// use measures the open run, and opens one where none is open.
func (v *victimOf) use() {
	if len(v.open) == 0 {
		id := fmt.Sprintf("r%d", rand.Uint64())
		require.NoError(v, v.s.OpenRun(state.Run{ID: id, MemberID: "a", OpenedAt: v.at}))
		promise("open %s", id)
		v.open[id] = v.at
	}
	v.sample(true)
	promise("sealed %d", v.s.Spool().LastSegment)
}

// end closes the open run.
func (v *victimOf) end() {
	if len(v.open) == 0 {
		return
	}
	v.sample(false)
	v.close()
	promise("sealed %d", v.s.Spool().LastSegment)
}

func (v *victimOf) close() {
	for id := range v.open {
		require.NoError(v, v.s.CloseRun(id))
		promise("closed %s", id)
	}
	clear(v.open)
}

func (v *victimOf) sample(up bool) {
	v.at = v.at.Add(10 * time.Second)
	observed := meter.Observation{At: v.at, CutEvery: 20 * time.Second}
	for id, from := range v.open {
		run := meter.Run{RunID: id, MemberID: "a", StartedAt: from, Up: up}
		if !up {
			run.ExitedAt = v.at
		}
		observed.Runs = append(observed.Runs, run)
	}
	require.NoError(v, v.s.SaveSample(observed, clock.Stamp{At: v.at}))
	promise("at %d", v.at.Unix())
}

func (v *victimOf) acknowledge() {
	posted := max(v.s.Spool().LastSegment/2, v.s.Spool().Marks.Posted)
	require.NoError(v, v.s.AcknowledgeUsage(spool.HubProgress{
		Incarnation: v.s.Incarnation(), Posted: posted, Archived: v.s.Spool().LastSegment / 3,
	}))
	promise("posted %d", posted)
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
	last := map[string]uint64{}
	open := map[string]bool{}
	for line := range strings.Lines(said) {
		switch kind, value, _ := strings.Cut(strings.TrimSpace(line), " "); kind {
		case "open", "closed":
			open[value] = kind == "open"
		default:
			number, err := strconv.ParseUint(value, 10, 64)
			require.NoError(t, err)
			last[kind] = number
		}
	}
	require.GreaterOrEqual(t, s.Bundle().Version(), last["bundle"])
	require.GreaterOrEqual(t, orderOf(s.Accepted().Epoch, s.Accepted().Generation), last["state"])
	require.NotNil(t, s.Accepted().Parts)
	for _, p := range s.Accepted().Parts {
		require.NotNil(t, p.Workload)
	}
	require.GreaterOrEqual(t, s.Leases()["a"].GetLeaseNo(), last["lease"])
	require.GreaterOrEqual(t, s.Spool().LastSegment, last["sealed"])
	require.GreaterOrEqual(t, s.Spool().Marks.Posted, last["posted"])
	if at, said := last["at"]; said {
		require.GreaterOrEqual(t, s.LastStamp().At.Unix(), int64(at))
	}
	for id, is := range open {
		if _, there := s.Runs()[id]; is && !there {
			require.True(t, s.Measured(id), "it was closed since")
		} else if !is {
			require.False(t, there, id)
		}
	}
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

// A container that the store did not know was up when nobody could read its counters. The next process must not take
// what they show first for use since then: it may be in records of before the store was lost.
func TestLaw05CountersThatWereNotReadYetCountFromTheirFirstReading(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	run := meter.Run{RunID: "r", MemberID: "a", StartedAt: noon.Add(-time.Hour), Up: true}
	sample(t, s, noon, run)
	require.NoError(t, s.Close())
	s = open(t, dir, m)
	run.Sampled, run.CPUMicros = true, time.Hour.Microseconds()
	sample(t, s, noon.Add(10*time.Second), run)
	run.CPUMicros += 5 * time.Second.Microseconds()
	sample(t, s, noon.Add(time.Minute), run)
	require.Equal(t, 5*time.Second.Microseconds(), s.Consumed("a")[protocol.MeterCPUSeconds])
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
