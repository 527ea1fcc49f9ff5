package nodes_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/e2e/sim"
	"github.com/gpuaas/gpuaas/hub/internal/backuprecord"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/hub/usagechain"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// twin is a hub on PostgreSQL beside the simulation's; one node speaks to both.
type twin struct {
	t    *testing.T
	rng  *rand.Rand
	hub  *hubtest.Hub
	node *hubtest.Node
	sim  *sim.Hub

	// session is nil before the first hello and after a restore, stream before the first segment of a session.
	session *hubtest.Session
	stream  *link.Stream
	// stores are the node's incarnations, names their order.
	stores map[string]*sealedChain
	names  []string

	backup *hubtest.BackupRows
	// seen counts what happened.
	seen map[string]int
}

// sealedChain is what a store has sealed, and its last record's number.
type sealedChain struct {
	segments []segment
	sequence uint64
}

type segment struct {
	*protocol.UsageSegment
	envelope *protocol.Envelope
}

// TestTheSimulationTakesUsageAsTheHub does the same at random to the hub and to the one of e2e/sim: hellos of new, old
// and rewound stores, usage in and out of order, again, forged and misnumbered, accepted states, backups and restores.
// After each step both have answered the same and have the same rows.
func TestTheSimulationTakesUsageAsTheHub(t *testing.T) {
	seen := map[string]int{}
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := newTwin(t, seed, seen)
			for range 80 {
				w.step()
				w.compare()
			}
		})
	}
	t.Log(seen)
	if t.Failed() {
		return
	}
	for _, what := range []string{
		"posted", "known", "set aside", "beyond a gap", "archived", "usage owed", "new incarnation", "upload wanted", "slots",
		protocol.Nack_CHAIN_BROKEN.Text(), protocol.Nack_OUT_OF_ORDER.Text(), protocol.Nack_MALFORMED.Text(),
	} {
		require.NotZero(t, seen[what], what)
	}
}

func newTwin(t *testing.T, seed uint64, seen map[string]int) *twin {
	h := hubtest.New(t)
	n := h.Enroll()
	w := &twin{
		t: t, rng: rand.New(rand.NewPCG(seed, 10)), hub: h, node: n, sim: sim.NewHub(n.ID),
		stores: map[string]*sealedChain{}, seen: seen,
	}
	w.planBackup(db.NewID()) // the simulation's hub always has one
	return w
}

func (w *twin) step() {
	switch dice := w.rng.IntN(30); {
	case w.session == nil || dice < 5:
		w.hello()
	case w.sim.Row().AwaitsResync:
		w.session.UploadState(&protocol.StateUpload{Last: true})
		w.sim.UploadNothing()
	case dice < 7:
		epoch, generation := uint64(w.rng.IntN(3)), uint64(w.rng.IntN(12))
		w.session.Ack(protocol.Envelope_STATE, epoch, generation)
		w.sim.Accepted(epoch, generation)
	case dice < 9:
		w.backUp()
	case dice < 10 && w.backup != nil:
		w.restore()
	case dice < 11:
		w.hub.Advance(4 * time.Hour) // to the next slot of raw usage
	default:
		w.usage()
	}
}

// hello opens a session of the same store, of a new one, or of one of before, which may have been put back.
func (w *twin) hello() {
	row := w.sim.Row()
	name := row.Incarnation
	switch dice := w.rng.IntN(10); {
	case len(w.names) == 0 || dice < 2:
		name = fmt.Sprint("i", len(w.names)+1)
		w.names, w.stores[name] = append(w.names, name), &sealedChain{}
	case dice < 4 || name == "":
		name = w.names[w.rng.IntN(len(w.names))]
	}
	posted := row.Chains[name].Number
	g := sim.Hello{
		Incarnation: name, Epoch: row.Epoch, Generation: row.Generation, LastSegment: posted + uint64(w.rng.IntN(4)),
	}
	switch w.rng.IntN(6) {
	case 0:
		g.LastSegment = posted - min(posted, 1)
	case 1:
		g.Epoch = uint64(w.rng.IntN(3))
	case 2:
		g.Generation = uint64(w.rng.IntN(12))
	}
	said := hubtest.Hello(name)
	said.Epoch, said.Generation, said.LastSegment = g.Epoch, g.Generation, g.LastSegment
	w.session, w.stream = w.node.Connect(said), nil
	got, want := w.session.Welcome, w.sim.Hello(g)
	require.Equal(w.t, want, sim.Welcome{
		SessionNo: got.GetSessionNo(), NewIncarnation: got.GetNewIncarnation(), UploadWanted: got.GetRequestStateUpload(),
		Posted: got.GetPostedSegment(), Archived: got.GetArchivedSegment(), PostedSHA256: string(got.GetPostedSha256()),
	}, "welcome to %+v", g)
	w.see("new incarnation", want.NewIncarnation)
	w.see("upload wanted", want.UploadWanted)
	w.see("archived", want.Archived > 0)
}

// usage sends a segment in the session.
func (w *twin) usage() {
	if w.stream == nil {
		w.stream = w.session.OpenUsage()
	}
	s, what := w.nextSegment()
	kept, aside := w.stored()
	ack, want := hubtest.Upload(w.t, w.stream, s.envelope), w.sim.Usage(s.UsageSegment, s.envelope.GetPayload())
	keptNow, asideNow := w.stored()
	require.Equal(w.t, want, sim.UsageAck{
		Refused: ack.GetNackReason(), New: keptNow+asideNow > kept+aside, SetAside: asideNow > aside,
		Posted: ack.GetPostedSegment(), Archived: ack.GetArchivedSegment(), PostedSHA256: string(ack.GetPostedSha256()),
	}, "segment %d of %s, %s", s.GetNumber(), s.GetIncarnation(), what)
	w.see(want.Refused.Text(), want.Refused != 0)
	w.see("posted", want.New)
	w.see("set aside", want.SetAside)
	w.see("known", !want.New && want.Refused == 0)
}

func (w *twin) nextSegment() (s segment, what string) {
	row := w.sim.Row()
	name, posted := row.Incarnation, row.Chains[row.Incarnation].Number
	switch dice := w.rng.IntN(20); {
	case dice < 10:
		return w.sealed(name, posted+1), "the next"
	case dice < 12:
		return w.sealed(name, 1+w.rng.Uint64N(posted+1)), "again"
	case dice < 15:
		return w.sealed(name, posted+2+w.rng.Uint64N(3)), "beyond a gap"
	case dice < 16:
		return w.seal(name, posted+1+w.rng.Uint64N(3), anyDigest(), 1, 1), "forged"
	case dice < 18:
		return w.seal(name, max(posted, 2)-w.rng.Uint64N(2), anyDigest(), 1, 1), "with another content"
	case dice < 19:
		return w.seal(name, posted+usagechain.MaxAhead+w.rng.Uint64N(2), anyDigest(), 1, 1), "far ahead"
	default:
		return w.sealed(w.names[w.rng.IntN(len(w.names))], 1), "the first of any store"
	}
}

// sealed is a segment of a store's own chain, which now and then has lost records.
func (w *twin) sealed(name string, number uint64) segment {
	c := w.stores[name]
	for uint64(len(c.segments)) < number {
		var previous []byte
		if n := len(c.segments); n > 0 {
			previous = hubtest.Sha(c.segments[n-1].envelope.GetPayload())
		}
		if w.rng.IntN(15) == 0 {
			c.sequence += 2
		}
		records := w.rng.Uint64N(4)
		c.segments = append(c.segments, w.seal(name, uint64(len(c.segments)+1), previous, c.sequence+1, records))
		c.sequence += records
	}
	return c.segments[number-1]
}

func (w *twin) seal(name string, number uint64, previous []byte, first, records uint64) segment {
	w.t.Helper()
	if number == 1 {
		previous = nil
	}
	now := w.hub.Now().Truncate(time.Microsecond)
	seg := &protocol.UsageSegment{
		NodeId: w.node.ID, Incarnation: name, Number: number, PreviousSha256: previous, SealedAt: timestamppb.New(now),
	}
	for n := range records {
		seg.Records = append(seg.Records, &protocol.UsageRecord{
			Sequence: first + n, MemberId: db.NewID(), Meter: protocol.MeterSessionSeconds, Quantity: 1_000_000, RunId: "r1",
			LeaseNo: 1, StartedAt: timestamppb.New(now.Add(-time.Second)), EndedAt: timestamppb.New(now),
		})
	}
	env, err := protocol.SignMessage(protocol.PayloadSegment, seg, protocol.NewEd25519Signer(w.node.Key))
	require.NoError(w.t, err)
	return segment{seg, env}
}

func anyDigest() []byte { return hubtest.Sha([]byte(db.NewID())) }

func (w *twin) planBackup(id string) {
	w.t.Helper()
	require.NoError(w.t, db.WriteTx(w.t.Context(), w.hub.DB, func(tx db.Tx) error {
		return backuprecord.Plan(w.t.Context(), tx, id, w.hub.Now().Truncate(time.Microsecond))
	}))
}

// backUp takes a backup as the program does: nodes hear of it once it is verified, which it does not hold itself.
func (w *twin) backUp() {
	id := db.NewID()
	w.planBackup(id)
	rows := w.hub.Backup()
	ends := hubtest.Tx(w.hub, ledger.ChainEnds)
	now := w.hub.Now().Truncate(time.Microsecond)
	require.NoError(w.t, recovery.RecordBackup(w.t.Context(), w.hub.DB,
		backuprecord.Record{ID: id, TakenAt: now, SizeBytes: 1, At: now}, func(ctx context.Context, tx db.Tx) error {
			return ledger.SetArchived(ctx, tx, ends)
		}))
	w.backup = &rows
	w.sim.Backup()
}

// restore goes back to the last backup, once.
func (w *twin) restore() {
	require.NoError(w.t, w.session.Conn.Close(link.CodeOK, ""))
	w.hub = w.hub.Restore(*w.backup)
	w.node.Hub, w.session, w.backup = w.hub, nil, nil
	w.sim.Restore()
}

// compare has the node report, which ends a resync that lacks nothing, and compares all rows.
func (w *twin) compare() {
	w.t.Helper()
	if w.session != nil {
		w.session.Report(0)
	}
	n := w.hub.NodeRow(w.node.ID)
	want := w.sim.Row()
	require.Equal(w.t, want, sim.NodeRow{
		Incarnation: n.Incarnation, Epoch: n.AcceptedEpoch, Generation: n.AcceptedGeneration, SessionNo: n.SessionNo,
		AwaitsResync: n.Resync.Status == fleet.AwaitingResync, OwesUsage: n.Resync.Status != fleet.InSync,
		Chains: w.chains(),
	}, "rows")
	w.see("usage owed", want.OwesUsage && !want.AwaitsResync)
	for _, c := range want.Chains {
		w.see("beyond a gap", len(c.Ahead) > 0)
	}
}

// chains reads what is posted of the node's stores.
func (w *twin) chains() map[string]sim.Chain {
	w.t.Helper()
	return hubtest.Tx(w.hub, func(ctx context.Context, tx db.Tx) (map[string]sim.Chain, error) {
		var name string
		var c sim.Chain
		var l usagechain.Link
		out := map[string]sim.Chain{}
		if err := db.ForEach(ctx, tx, []any{&name, &c.Number, &c.SHA256, &c.LastRecord, &c.Archived}, func() {
			c.Ahead = map[uint64]usagechain.Link{}
			if len(c.SHA256) == 0 {
				c.SHA256 = nil
			}
			out[name] = c
		}, `SELECT incarnation, number, sha256, last_record, archived FROM usage_watermarks WHERE number > 0
			OR incarnation IN (SELECT incarnation FROM usage_ahead)`); err != nil {
			return nil, err
		}
		return out, db.ForEach(ctx, tx, []any{&name, &l.Number, &l.SHA256, &l.Previous, &l.First, &l.Last}, func() {
			out[name].Ahead[l.Number] = l
		}, `SELECT incarnation, number, sha256, previous_sha256, first_record, last_record FROM usage_ahead`)
	})
}

// stored counts the segments that are posted and those that are set aside.
func (w *twin) stored() (kept, aside int) {
	w.t.Helper()
	slots := hubtest.Tx(w.hub, ledger.Slots)
	for _, s := range slots {
		kept += hubtest.Count(w.hub, fmt.Sprint(`SELECT count(*) FROM usage_segments_`, s.No))
	}
	w.see("slots", len(slots) > 1)
	return kept, hubtest.Count(w.hub, `SELECT count(*) FROM usage_set_aside`)
}

func (w *twin) see(what string, happened bool) {
	if happened {
		w.seen[what]++
	}
}
