package ledger_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	isolationRounds = 8
	// roundLength is what each round reports of each member, in segmentsPerRound segments. A lease outlives two rounds.
	roundLength      = 10 * time.Minute
	roundLease       = 25 * time.Minute
	segmentsPerRound = 5
	membersPerNode   = 3
	allocationSKU    = "gpu"
)

// mixed is a world in which all that changes the books happens at once, to members of the same nodes and orgs.
type mixed struct {
	*world
	rng   *rand.Rand
	nodes []*reporter
	// closed are the members that have ended.
	closed []ledger.Subject
	sent   map[string]int64 // by member and meter

	mu       sync.Mutex
	isNew    map[string]int // how often each segment was posted as a new one
	issued   atomic.Int64
	refused  atomic.Int64
	attempts atomic.Int64
}

// reporter is a node with its open members and allocations.
type reporter struct {
	id          string
	org         string
	members     []ledger.Subject
	allocations []ledger.Subject
	sequence    uint64
	segments    uint64
}

// step is one transaction.
type step func() error

// TestLaw06PostingBesideSerializableTransactionsKeepsTheBooks posts usage at READ COMMITTED, each segment from several
// hubs, while serializable transactions renew leases, grant credit, post to the journal, open, close and settle
// members, take and release holds of allocations: all at once, on the same orgs and members. Whatever the order, each
// record is billed once or in suspense, the journal is the bill, and each hold covers the leases of its member.
func TestLaw06PostingBesideSerializableTransactionsKeepsTheBooks(t *testing.T) {
	m := newMixed(t)
	transactions := 0
	for range isolationRounds {
		m.now = m.now.Add(roundLength)
		for _, n := range m.nodes {
			steps := slices.Concat(m.reportUsage(n), m.grantCredit(n.org), m.renewLeases(n), m.replaceMembers(n),
				m.useAllocations(n))
			m.rng.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
			inParallel(t, steps, func(s step) error { return s() })
			transactions += len(steps)
		}
		m.checkInvariants()
		m.checkHolds()
	}
	t.Logf("%d transactions in %d attempts", transactions, m.attempts.Load())
	m.settle()
	m.checkBill()
	m.checkRecords()
	require.Equal(t, m.issued.Load(), number(m.world, `SELECT count(*) FROM leases`), "each lease is stored")
	require.Positive(t, m.refused.Load(), "the wallets always covered everything")
	require.Zero(t, number(m.world, `SELECT count(*) FROM holds h JOIN subjects s ON s.id = h.subject_id
		WHERE s.settled_at IS NOT NULL AND placed_nanos <> posted_nanos + released_nanos`), "a settled hold keeps money")
	require.Zero(t, number(m.world, `SELECT count(*) FROM usage_hours WHERE meter <> $1 AND written_off_nanos <> 0`,
		ledger.MeterAllocationSeconds), "a hold did not cover its leases")
}

func newMixed(t *testing.T) *mixed {
	m := &mixed{
		world: newWorld(t), rng: rand.New(rand.NewPCG(6, 6)), sent: map[string]int64{}, isNew: map[string]int{},
	}
	// A member costs 1.1 nanos for each microsecond.
	m.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "3.6")
	m.price(ledger.Price{Meter: protocol.MeterCPUSeconds, HostBasisPoints: 3333}, "0.36")
	m.price(ledger.Price{Meter: ledger.MeterAllocationSeconds, SKU: allocationSKU}, "3.6")
	orgs := []string{db.NewID(), db.NewID()}
	for range 5 {
		inParallel(t, slices.Concat(m.grantCredit(orgs[0]), m.grantCredit(orgs[1])), func(s step) error { return s() })
	}
	for n := range 4 {
		m.nodes = append(m.nodes, &reporter{id: db.NewID(), org: orgs[n%len(orgs)]})
		for _, s := range m.replaceMembers(m.nodes[n]) {
			require.NoError(t, s())
		}
	}
	return m
}

// tx is a serializable transaction.
func (m *mixed) tx(fn func(ctx context.Context, tx db.Tx) error) step {
	return func() error {
		return do(m.world, func(ctx context.Context, tx db.Tx) error {
			m.attempts.Add(1)
			return fn(ctx, tx)
		})
	}
}

// reportUsage seals what a node measured in the round. Each segment arrives three times: twice alone and once with the
// others.
func (m *mixed) reportUsage(n *reporter) (steps []step) {
	const piece = roundLength / segmentsPerRound
	var all []ledger.Segment
	for to := m.now.Add(-roundLength + piece); !to.After(m.now) && len(n.members) > 0; to = to.Add(piece) {
		var records []*protocol.UsageRecord
		for _, s := range n.members {
			for _, meter := range []string{protocol.MeterSessionSeconds, protocol.MeterCPUSeconds} {
				n.sequence++
				records = append(records, record(n.sequence, s, meter, to.Add(-piece).Sub(noon).Seconds(),
					to.Sub(noon).Seconds(), piece.Microseconds()))
				m.sent[s.ID+meter] += piece.Microseconds()
			}
		}
		all = append(all, m.seal(n, records))
		steps = append(steps, m.post(all[len(all)-1]), m.post(all[len(all)-1]))
	}
	return append(steps, m.post(all...))
}

func (m *mixed) seal(n *reporter, records []*protocol.UsageRecord) ledger.Segment {
	n.segments++
	s, err := segmentOf(n.id, incarnation, n.segments, records...)
	require.NoError(m.t, err)
	return s
}

func (m *mixed) post(segments ...ledger.Segment) step {
	return func() error {
		results, err := db.LockTx(m.t.Context(), m.d, func(tx db.Tx) ([]ledger.Posted, error) {
			m.attempts.Add(1)
			return ledger.PostUsage(m.t.Context(), tx, m.now, segments...)
		})
		m.mu.Lock()
		defer m.mu.Unlock()
		for n, r := range results {
			if r.Err != nil {
				return r.Err
			}
			if r.New {
				m.isNew[fmt.Sprint(segments[n].Store.NodeID, segments[n].Link.Number)]++
			}
		}
		return err
	}
}

func (m *mixed) grantCredit(org string) (steps []step) {
	for range 2 {
		m.keys++
		g := ledger.Grant{OrgID: org, Currency: "EUR", Nanos: ledger.NanosPerUnit, Key: fmt.Sprint(org, m.keys)}
		steps = append(steps, m.tx(func(ctx context.Context, tx db.Tx) error {
			_, err := ledger.GrantCredit(ctx, tx, g, m.now)
			return err
		}))
	}
	return steps
}

// renewLeases lets two hubs renew the lease of each member, reduce its hold where it has none, and post its usage to
// the journal.
func (m *mixed) renewLeases(n *reporter) (steps []step) {
	for _, s := range n.members {
		r := ledger.LeaseRequest{SubjectID: s.ID, NodeID: s.NodeID, Now: m.now, Duration: roundLease, AppSlug: s.AppSlug}
		renew := func() error {
			out, err := run(m.world, func(ctx context.Context, tx db.Tx) (ledger.Renewal, error) {
				m.attempts.Add(1)
				return ledger.RenewLease(ctx, tx, r)
			})
			m.count(out.Issued)
			return err
		}
		journal := m.tx(func(ctx context.Context, tx db.Tx) error { return ledger.PostPending(ctx, tx, s.ID, m.now) })
		reduce := m.tx(func(ctx context.Context, tx db.Tx) error { return ledger.ReduceHold(ctx, tx, s.ID, m.now) })
		steps = append(steps, renew, renew, journal, journal, journal, reduce)
	}
	return steps
}

func (m *mixed) count(issued bool) {
	if issued {
		m.issued.Add(1)
	} else {
		m.refused.Add(1)
	}
}

// replaceMembers ends the oldest member of a node that has all of its members, with its final record, and opens those
// that are missing.
func (m *mixed) replaceMembers(n *reporter) (steps []step) {
	if len(n.members) == membersPerNode {
		s := n.members[0]
		n.members = slices.Clone(n.members[1:])
		m.closed = append(m.closed, s)
		n.sequence++
		end := m.now.Sub(noon).Seconds()
		final := record(n.sequence, s, protocol.MeterSessionSeconds, end, end, 0)
		final.Final = true
		last := m.seal(n, []*protocol.UsageRecord{final})
		steps = append(steps, m.post(last), m.post(last), m.tx(func(ctx context.Context, tx db.Tx) error {
			return ledger.CloseSubject(ctx, tx, s.ID, m.now, m.now)
		}))
	}
	for range membersPerNode - len(n.members) {
		s := m.subjectOn(n, ledger.Member)
		s.CPUMillis = 1000
		steps = append(steps, m.open(s, &n.members))
	}
	for _, s := range m.closed {
		if s.NodeID == n.id {
			steps = append(steps, m.tx(func(ctx context.Context, tx db.Tx) error {
				_, err := ledger.SettleDue(ctx, tx, s.ID, m.now)
				return err
			}))
		}
	}
	return steps
}

func (m *mixed) subjectOn(n *reporter, kind string) ledger.Subject {
	m.org, m.node = n.org, n.id
	return m.subject(kind)
}

// open opens a subject and adds it to the open ones, where the wallet covers it.
func (m *mixed) open(s ledger.Subject, open *[]ledger.Subject) step {
	return func() error {
		err := do(m.world, func(ctx context.Context, tx db.Tx) error {
			m.attempts.Add(1)
			if s.Kind == ledger.Allocation {
				return ledger.OpenSubject(ctx, tx, s)
			}
			_, err := ledger.OpenMember(ctx, tx, s, roundLease)
			return err
		})
		if err != nil && faultCode(err) != "insufficient_funds" {
			return err
		}
		if s.Kind == ledger.Member {
			m.count(err == nil)
		}
		if err == nil {
			m.mu.Lock()
			defer m.mu.Unlock()
			*open = append(*open, s)
		}
		return nil
	}
}

// useAllocations lets two hubs accrue each allocation of a node, opens one and releases the oldest.
func (m *mixed) useAllocations(n *reporter) (steps []step) {
	for _, s := range n.allocations {
		accrue := m.tx(func(ctx context.Context, tx db.Tx) error {
			_, err := ledger.AccrueAllocation(ctx, tx, s.ID, m.now)
			return err
		})
		steps = append(steps, accrue, accrue)
	}
	if len(n.allocations) > 0 {
		s := n.allocations[0]
		n.allocations = slices.Clone(n.allocations[1:])
		steps = append(steps, m.tx(func(ctx context.Context, tx db.Tx) error {
			return ledger.CloseSubject(ctx, tx, s.ID, m.now, m.now)
		}))
	}
	s := m.subjectOn(n, ledger.Allocation)
	s.SKU = allocationSKU
	return append(steps, m.open(s, &n.allocations))
}

// checkRecords: each segment was new once, and what each member used is billed or in suspense, all of it and once.
func (m *mixed) checkRecords() {
	m.t.Helper()
	for _, n := range m.nodes {
		for number := range n.segments {
			require.Equal(m.t, 1, m.isNew[fmt.Sprint(n.id, number+1)], "segment %d of %s", number+1, n.id)
		}
		require.EqualValues(m.t, n.sequence, number(m.world,
			`SELECT last_record FROM usage_watermarks WHERE node_id = $1`, n.id), "posted without a gap")
	}
	stored := map[string]int64{}
	for _, table := range []string{
		`usage_hours WHERE meter <> 'allocation_seconds'`, `(SELECT member_id AS subject_id, * FROM suspense_records) s`,
	} {
		query(m.world, `SELECT subject_id::text || meter, quantity FROM `+table,
			func(scan func(...any) error) (struct{}, error) {
				var key string
				var quantity int64
				err := scan(&key, &quantity)
				stored[key] += quantity
				return struct{}{}, err
			})
	}
	require.Equal(m.t, m.sent, stored)
	require.Zero(m.t, number(m.world, `SELECT count(*) FROM suspense_records WHERE reason <> $1`,
		billing.SuspenseOutsideLease), "nothing was named twice, or after its end")
}

// checkHolds: the hold of an open member covers what its leases may still cost from where it is billed, and keeps the
// margin at most. A lease that is issued while an earlier segment is missing counts that as reported, so that the
// missing one takes part of the margin.
func (m *mixed) checkHolds() {
	m.t.Helper()
	leased, covered, balance := map[string][]rating.Interval{}, map[string]time.Time{}, map[string]int64{}
	query(m.world, `SELECT s.id::text, l.issued_at, l.expires_at, h.placed_nanos - h.posted_nanos - h.released_nanos,
			coalesce((SELECT max(c.to_at) FROM usage_coverage c WHERE c.subject_id = s.id), s.opened_at)
		FROM subjects s JOIN leases l ON l.subject_id = s.id JOIN holds h ON h.subject_id = s.id
		WHERE s.closed_at IS NULL AND s.kind = 'member'`, func(scan func(...any) error) (struct{}, error) {
		var id string
		var window rating.Interval
		var nanos int64
		var until time.Time
		err := scan(&id, &window.From, &window.To, &nanos, &until)
		leased[id], covered[id], balance[id] = append(leased[id], window), until, nanos
		return struct{}{}, err
	})
	require.NotEmpty(m.t, leased)
	for id, windows := range leased {
		ahead := rating.Interval{From: covered[id], To: m.now.Add(billing.MaxLease)}
		micros := rating.TotalLength(rating.Intersect(ahead, rating.Union(windows)))
		require.GreaterOrEqual(m.t, balance[id], micros+micros/10, "the hold of member %s covers its lease", id)
		micros += billing.HoldMargin.Microseconds()
		require.LessOrEqual(m.t, balance[id], micros+micros/10, "the hold of member %s keeps no more", id)
	}
}
