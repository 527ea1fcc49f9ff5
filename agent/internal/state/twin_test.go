package state_test

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/agent/spool/spooltest"
	"github.com/gpuaas/gpuaas/e2e/sim/nodestore"
	"github.com/gpuaas/gpuaas/protocol"
)

// twin is a store in Badger beside the one in memory that the nodes of the simulation have.
type twin struct {
	*mesh
	rng   *rand.Rand
	dir   string
	disk  *state.Store
	model *nodestore.Store
	now   time.Time
	// maxUnsent of one byte makes the spool full as soon as anything is unsent.
	maxUnsent  int64
	generation uint64
	runNo      int
	// machine are the containers, by run id; sent are leases, envelopes and documents that may come again.
	machine map[string]meter.Run
	states  []protocol.Verified[*protocol.DesiredState]
	parts   [][]byte
	leaseNo map[string]uint64
	refused map[protocol.Nack_Reason]int
	crashes int
}

// TestTheSimulationsStoreIsTheNodes does the same at random to the store and to that of e2e/sim, with crashes between:
// they accept and refuse the same for the same reasons, keep the same, and seal the same bytes.
func TestTheSimulationsStoreIsTheNodes(t *testing.T) {
	sequences := uint64(200)
	if testing.Short() {
		sequences = 40
	}
	refused, crashes, segments := map[protocol.Nack_Reason]int{}, 0, uint64(0)
	for seed := range sequences {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := newTwin(t, seed)
			for range 40 {
				w.now = w.now.Add(time.Duration(w.rng.IntN(60_000)) * time.Millisecond)
				w.step()
				w.compare()
			}
			w.reopen()
			w.compare()
			require.NoError(t, w.disk.Close())
			for reason, n := range w.refused {
				refused[reason] += n
			}
			crashes, segments = crashes+w.crashes, segments+w.model.Chain.Number
		})
	}
	for _, reason := range []protocol.Nack_Reason{
		protocol.Nack_EPOCH_UNKNOWN, protocol.Nack_GENERATION_OLDER, protocol.Nack_GENERATION_CONFLICT,
		protocol.Nack_UNKNOWN_PART, protocol.Nack_WRONG_NODE, protocol.Nack_UNAVAILABLE,
	} {
		require.NotZero(t, refused[reason], "nothing was refused with %s", reason)
	}
	require.NotZero(t, crashes)
	require.NotZero(t, segments)
}

func newTwin(t *testing.T, seed uint64) *twin {
	w := &twin{
		mesh:       victimMesh(t),
		rng:        rand.New(rand.NewPCG(seed, 7)),
		dir:        inMemory(t),
		now:        noon,
		maxUnsent:  spool.MaxUnsentBytes,
		generation: 1,
		machine:    map[string]meter.Run{},
		leaseNo:    map[string]uint64{},
		refused:    map[protocol.Nack_Reason]int{},
	}
	if w.rng.IntN(4) == 0 {
		w.maxUnsent = 1
	}
	w.open()
	w.model = nodestore.New(nodeID, w.disk.Incarnation())
	w.model.MaxUnsentBytes, w.model.Bundle = w.maxUnsent, w.bundle
	return w
}

// inMemory is a directory on a tmpfs where there is one: the crashes of this test lose no write, and syncs take time.
func inMemory(t testing.TB) string {
	const tmpfs = "/dev/shm"
	if _, err := os.Stat(tmpfs); err != nil {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(tmpfs, "gpuaas-state-") //nolint:usetesting // t.TempDir cannot be told where
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

func (w *twin) open() {
	var err error
	w.disk, err = state.Open(w.dir, state.Options{MinFreeBytes: 1, MaxUnsentBytes: w.maxUnsent})
	require.NoError(w.t, err)
	require.NoError(w.t, w.resume(w.disk))
	require.NoError(w.t, w.disk.Identify(nodeID, protocol.NewEd25519Signer(w.node)))
	if !w.disk.Bundle().Valid() {
		require.NoError(w.t, w.disk.InitBundle(w.bundle))
	}
}

// reopen opens a copy of the files that the store has not closed, which is what a killed process leaves.
func (w *twin) reopen() {
	w.crashes++
	next := ""
	require.Eventually(w.t, func() bool { // unless Badger has replaced a file meanwhile
		next = inMemory(w.t)
		before := w.files()
		return w.copyFiles(before, next) == nil && slices.Equal(before, w.files())
	}, 10*time.Second, time.Millisecond)
	require.NoError(w.t, w.disk.Close())
	require.NoError(w.t, os.RemoveAll(w.dir))
	w.dir = next
	w.open()
	w.model.Reopen()
}

// files are those that matter to a start of the agent.
func (w *twin) files() (names []string) {
	entries, err := os.ReadDir(w.dir)
	require.NoError(w.t, err)
	for _, e := range entries {
		if name := e.Name(); name != "LOCK" && name != "spare" && name != "reserve" {
			names = append(names, name)
		}
	}
	return names
}

// copyFiles copies first what refers to other files: Badger may finish a table meanwhile, which the copied manifest
// must not name while the copied table is empty still.
func (w *twin) copyFiles(names []string, to string) error {
	rank := func(name string) int {
		return slices.Index([]string{"", ".mem", ".sst", ".vlog"}, filepath.Ext(name))
	}
	for _, name := range slices.SortedStableFunc(slices.Values(names), func(a, b string) int {
		return cmp.Compare(rank(a), rank(b))
	}) {
		if err := copyData(filepath.Join(w.dir, name), filepath.Join(to, name)); err != nil {
			return err
		}
	}
	return nil
}

// copyData copies a file without its holes: Badger allocates much more than it writes.
func copyData(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer out.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	for at := int64(0); ; {
		data, err := in.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // no data follows
			return out.Truncate(info.Size())
		}
		hole, holeErr := in.Seek(data, unix.SEEK_HOLE)
		if err = errors.Join(err, holeErr); err != nil {
			return err
		}
		at = hole
		if _, err := io.Copy(io.NewOffsetWriter(out, data), io.NewSectionReader(in, data, hole-data)); err != nil {
			return err
		}
	}
}

// step does one thing to both stores.
func (w *twin) step() {
	switch dice := w.rng.IntN(30); {
	case dice < 5:
		w.acceptState()
	case dice < 6:
		w.acceptPart()
	case dice < 9:
		w.acceptLeases()
	case dice < 12:
		w.openRun()
	case dice < 14:
		w.changeMachine()
	case dice < 20:
		w.sample()
	case dice < 21:
		w.changeJournal()
	case dice < 22:
		w.setClock()
	case dice < 24:
		w.retire()
	case dice < 27:
		w.acknowledge()
	case dice < 28:
		w.rewind()
	case dice < 29:
		lost, err := w.disk.TakeNewIncarnation(w.now)
		require.NoError(w.t, err)
		require.Empty(w.t, lost)
		require.NoError(w.t, w.model.TakeNewIncarnation(w.disk.Incarnation(), w.now))
	default:
		w.reopen()
	}
}

// same requires that both stores refuse for the same reason, or that neither does.
func (w *twin) same(disk, model error) {
	w.t.Helper()
	require.Equal(w.t, disk == nil, model == nil, "the disk says %v, the model %v", disk, model)
	require.Equal(w.t, errors.Is(disk, spool.ErrOtherStore), errors.Is(model, spool.ErrOtherStore))
	if disk != nil {
		require.Equal(w.t, protocol.RefusalOf(disk), protocol.RefusalOf(model), "the disk says %v, the model %v", disk, model)
		w.refused[protocol.RefusalOf(disk)]++
	}
}

func (w *twin) member() string { return string(rune('a' + w.rng.IntN(5))) }

func (w *twin) acceptState() {
	if len(w.states) > 0 && w.rng.IntN(4) == 0 {
		old := w.states[w.rng.IntN(len(w.states))]
		w.same(w.disk.AcceptState(old, w.parts), w.model.AcceptState(old, w.parts))
		return
	}
	generation := w.generation + uint64(w.rng.IntN(3))
	if w.epoch == 1 && w.rng.IntN(8) == 0 {
		w.nextEpoch()
	}
	var workloads []*protocol.Workload
	for id := range 5 {
		if w.rng.IntN(2) == 0 {
			continue
		}
		wl := workload(string(rune('a'+id)), 1+uint64(w.rng.IntN(3)))
		wl.Stopped = w.rng.IntN(4) == 0
		wl.CorrelationId = strconv.Itoa(w.rng.IntN(3))
		workloads = append(workloads, wl)
	}
	v, parts := w.desired(generation, workloads...)
	w.states = append(w.states, v)
	if w.rng.IntN(3) == 0 {
		w.rng.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		w.parts = parts
		parts = parts[:w.rng.IntN(len(parts)+1)]
	}
	disk := w.disk.AcceptState(v, parts)
	if w.same(disk, w.model.AcceptState(v, parts)); disk == nil {
		w.generation = generation
	}
}

// nextEpoch is what a restore of the hub does: generations start anew, and older documents are refused.
func (w *twin) nextEpoch() {
	w.epoch, w.generation = 2, 1
	older, newer := w.bundle.Envelope(), w.bundleEnvelope(2)
	for _, env := range []*protocol.Envelope{older, newer, newer, older} {
		w.same(w.disk.AcceptBundle(env), w.model.AcceptBundle(env))
		require.Equal(w.t, w.disk.Bundle().Version(), w.model.Bundle.Version())
	}
	w.bundle = w.model.Bundle
	require.Equal(w.t, w.epoch, w.bundle.Epoch())
}

func (w *twin) acceptPart() {
	raw, err := proto.Marshal(workload(w.member(), 9))
	require.NoError(w.t, err)
	if len(w.parts) > 0 && w.rng.IntN(4) > 0 {
		raw = w.parts[w.rng.IntN(len(w.parts))]
	}
	w.same(w.disk.AcceptPart(raw), w.model.AcceptPart(raw))
}

func (w *twin) acceptLeases() {
	incarnation := w.disk.Incarnation()
	if w.rng.IntN(6) == 0 {
		incarnation = "another"
	}
	var batch []*protocol.Lease
	for range 1 + w.rng.IntN(4) {
		id := w.member()
		if w.rng.IntN(3) > 0 {
			w.leaseNo[id]++
		}
		if w.leaseNo[id] > 0 {
			batch = append(batch, lease(id, w.leaseNo[id]))
		}
	}
	env, err := protocol.SignMessage(protocol.PayloadLeases, &protocol.LeaseBatch{
		NodeId: nodeID, Incarnation: incarnation, Epoch: w.epoch, Leases: batch, IssuedAt: timestamppb.New(w.now),
	}, protocol.NewEd25519Signer(w.lease))
	require.NoError(w.t, err)
	v, err := protocol.VerifyLeases(env, w.bundle, w.identity())
	require.NoError(w.t, err)
	w.same(w.disk.AcceptLeases(v), w.model.AcceptLeases(v.Message()))
}

func (w *twin) openRun() {
	id := w.member()
	w.runNo++
	r := agent.Run{
		ID: fmt.Sprintf("%s.%d", id, w.runNo), MemberID: id, InstanceID: "i-" + id, Service: "main",
		Revision: 1 + uint64(w.rng.IntN(3)), LeaseNo: w.leaseNo[id], OpenedAt: w.now,
	}
	decided := map[string]admission.Decision{}
	for _, p := range w.disk.Accepted().Parts {
		decided[p.SHA256Hex()] = admission.Decision{Admitted: true}
	}
	w.disk.SetAdmissions(decided)
	opened, err := w.disk.OpenRunIfDesired(r)
	require.NoError(w.t, err)
	require.Equal(w.t, opened, w.model.OpenRunIfDesired(r))
	if !opened && w.rng.IntN(8) > 0 {
		return
	}
	// Or a container that only the machine knows.
	require.NoError(w.t, w.disk.JournalRun(r))
	w.model.JournalRun(r)
	w.machine[r.ID] = meter.Run{RunID: r.ID, MemberID: id, Revision: r.Revision, LeaseNo: r.LeaseNo}
}

// changeMachine lets a container come up, end, or disappear with its run.
func (w *twin) changeMachine() {
	for id, r := range w.machine {
		switch dice := w.rng.IntN(4); {
		case r.StartedAt.IsZero() && dice > 0:
			r.StartedAt, r.Up = w.now, true
		case r.Up && dice == 0:
			r.Up, r.ExitedAt = false, w.now
		case !r.Up || dice == 1:
			delete(w.machine, id)
			require.NoError(w.t, w.disk.CloseRun(id))
			w.model.CloseRun(id)
			continue
		}
		w.machine[id] = r
	}
}

func (w *twin) sample() {
	o := meter.Observation{At: w.now, CutEvery: time.Minute}
	for _, r := range w.machine {
		r.LeaseNo = w.model.Leases[r.MemberID].GetLeaseNo()
		if r.Up {
			r.Sampled, r.MemoryBytes, r.CPUMicros = true, w.rng.Int64N(1<<30), w.now.Sub(r.StartedAt).Microseconds()/2
		}
		o.Runs = append(o.Runs, r)
	}
	stamp := clock.Stamp{At: w.now, RTC: w.now, BootID: "boot", Synced: w.rng.IntN(2) == 0}
	w.same(w.disk.SaveSample(o, stamp), w.model.SaveSample(o, stamp))
}

func (w *twin) changeJournal() {
	id, at := w.member(), w.now
	require.NoError(w.t, w.disk.UpdateMember(id, func(m *state.Member) {
		m.RetryAt, m.ExitedAt = at, at
		m.Services = map[string]agent.ServiceRecord{"db": {ExitedAt: at, NetworkReady: true}}
	}))
	w.model.UpdateMember(id, func(m *nodestore.Member) {
		m.RetryAt, m.ExitedAt = at, at
		m.Services = map[string]agent.ServiceRecord{"db": {ExitedAt: at, NetworkReady: true}}
	})
	run := fmt.Sprintf("%s.%d", id, w.rng.IntN(w.runNo+1))
	require.NoError(w.t, w.disk.UpdateRun(run, func(r *state.Run) {
		r.ReadyAt, r.StartedAt, r.StopRequested = at, at, true
	}))
	w.model.UpdateRun(run, func(r *agent.Run) { r.ReadyAt, r.StartedAt, r.StopRequested = at, at, true })
}

func (w *twin) setClock() {
	from := w.now
	w.now = w.now.Add(time.Duration(w.rng.IntN(7200)-3600) * time.Second)
	to := clock.Stamp{At: w.now, RTC: w.now, BootID: "boot", Synced: true}
	w.same(w.disk.SetClock(from, to), w.model.SetClock(from, to))
}

func (w *twin) retire() {
	id := w.member()
	w.same(w.disk.Retire(id, protocol.RemovalKinds(), w.now), w.model.Retire(id, w.now))
	if w.rng.IntN(2) == 0 {
		require.NoError(w.t, w.disk.AcknowledgeRemovals([]string{id}))
		w.model.AcknowledgeRemovals([]string{id})
	}
}

// acknowledge says how far the hub is: sometimes too far, of another incarnation, or of another segment.
func (w *twin) acknowledge() {
	said := spool.HubProgress{Incarnation: w.disk.Incarnation(), Posted: uint64(w.rng.IntN(int(w.model.Chain.Number) + 1))}
	said.Archived = uint64(w.rng.IntN(int(said.Posted) + 1))
	if sealed, kept := w.model.Segments[said.Posted]; kept && w.rng.IntN(2) == 0 {
		_, after, err := spooltest.VerifyNext(spool.Chain{
			NodeID: nodeID, Incarnation: said.Incarnation, Number: said.Posted - 1, SHA256: sealed.Segment.GetPreviousSha256(),
			Sequence: sealed.Segment.GetRecords()[0].GetSequence() - 1,
		}, sealed.Payload)
		require.NoError(w.t, err)
		said.PostedSHA256 = after.SHA256
	}
	switch w.rng.IntN(12) {
	case 0:
		said.Incarnation = "another"
	case 1:
		said.Posted = w.model.Chain.Number + 1
	case 2:
		said.PostedSHA256 = []byte("of another segment")
	}
	w.same(w.disk.AcknowledgeUsage(said), w.model.AcknowledgeUsage(said))
}

func (w *twin) rewind() {
	posted := uint64(w.rng.IntN(int(w.model.Marks.Posted) + 1))
	w.same(w.disk.RewindUsage(posted), w.model.RewindUsage(posted))
}
