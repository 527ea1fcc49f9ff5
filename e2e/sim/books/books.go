// Package books is a ledger in memory: it keeps in maps what hub/internal/ledger keeps in tables, and calls hub/billing
// for every decision. The simulation bills with it; the ledger's own tests compare it with PostgreSQL.
package books

import (
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// ErrUnaffordable says that a wallet does not cover the next lease.
var ErrUnaffordable = errors.New("the wallet does not cover the lease")

// Faults are rules that a test leaves out.
type Faults struct {
	// NoClip bills what lies outside lease and claim.
	NoClip bool
	// NoSuspendedCost caps a lease as if the node did not count usage in suspense.
	NoSuspendedCost bool
	// NoHostLeg forgets the host's leg of a posting.
	NoHostLeg bool
	// LateHold extends the hold of what is reserved only after its time is billed.
	LateHold bool
}

// Config is what all members have in common.
type Config struct {
	Currency string
	Prices   []billing.FrozenPrice
	Faults   Faults
}

// Books are all members' accounts of one hub.
type Books struct {
	Config
	// Balances are those of the accounts, Postings how many changed them.
	Balances map[string]int64
	Postings int
	Book     *billing.Book
	Members  map[string]*Account
	// Reserved are the open allocations, volumes and attachments.
	Reserved map[string]*Reservation
}

// Reservation is what an org has reserved on a node.
type Reservation struct {
	billing.Reserved
	Org, NodeID string
	OpenedAt    time.Time
}

// Account is what the books keep of a member beside the billing.Book.
type Account struct {
	Org     string
	Final   billing.Final
	Settled bool
	// Suspended is the usage in suspense that counts against the lease, by meter; AtLease is the running time in it when
	// the newest lease was issued.
	Suspended map[string]billing.SuspendedTotal
	AtLease   int64
}

// New returns empty books.
func New(c Config) *Books {
	return &Books{
		Config: c, Balances: map[string]int64{}, Book: billing.NewBook(), Members: map[string]*Account{},
		Reserved: map[string]*Reservation{},
	}
}

// Clone is a backup: it shares nothing that changes.
func (b *Books) Clone() *Books {
	c := *b
	c.Balances = maps.Clone(b.Balances)
	c.Members = make(map[string]*Account, len(b.Members))
	for id, a := range b.Members {
		copied := *a
		copied.Suspended = maps.Clone(a.Suspended)
		c.Members[id] = &copied
	}
	c.Reserved = make(map[string]*Reservation, len(b.Reserved))
	for id, r := range b.Reserved {
		copied := *r
		c.Reserved[id] = &copied
	}
	c.Book = &billing.Book{
		Members: make(map[string]*billing.Member, len(b.Book.Members)), Leases: maps.Clone(b.Book.Leases),
		Holds: maps.Clone(b.Book.Holds), Billed: make(map[billing.TimeKey]*billing.BilledTime, len(b.Book.Billed)),
		Hours: make(map[string]billing.Hours, len(b.Book.Hours)),
	}
	for id, m := range b.Book.Members {
		copied := *m
		c.Book.Members[id] = &copied
	}
	for key, t := range b.Book.Billed {
		c.Book.Billed[key] = &billing.BilledTime{Since: t.Since, Coverage: rating.NewCoverage(slices.Clone(t.Spans()))}
	}
	for id, hours := range b.Book.Hours {
		c.Book.Hours[id] = slices.Clone(hours)
	}
	return &c
}

// Grant puts money into an org's wallet.
func (b *Books) Grant(org string, nanos int64) error {
	return b.post(billing.Transfer(billing.AccountCredit, billing.WalletAccount(org), b.Currency, nanos))
}

// Open starts billing of a member.
func (b *Books) Open(org string, m billing.Member) {
	b.Book.Members[m.ID] = &m
	b.Members[m.ID] = &Account{Org: org, Suspended: map[string]billing.SuspendedTotal{}}
}

// Discard forgets a member that was opened and got no lease.
func (b *Books) Discard(memberID string) {
	delete(b.Book.Members, memberID)
	delete(b.Members, memberID)
}

// Lease is a member's newest lease; the zero lease where it has none.
func (b *Books) Lease(memberID string) billing.Lease { return b.Book.Leases[memberID].Newest() }

// IsOpen reports whether a member's claim has not ended.
func (b *Books) IsOpen(memberID string) bool { return b.Book.Members[memberID].ClosedAt.IsZero() }

// Wallet is what an org can still spend.
func (b *Books) Wallet(org string) int64 { return b.Balances[billing.WalletAccount(org)] }

// IssueLease gives a member its next lease and holds what it may cost.
func (b *Books) IssueLease(memberID string, now time.Time, wish time.Duration) (billing.Lease, error) {
	m, a := b.Book.Members[memberID], b.Members[memberID]
	l, lacks, ok := billing.NextLease(*m, b.past(memberID, now), billing.Wish{
		Now: now, Duration: wish, Currency: b.Currency, Prices: b.Prices, WalletNanos: b.Wallet(a.Org),
	})
	if !ok {
		return billing.Lease{}, ErrUnaffordable
	}
	return l, b.keepLease(l, lacks)
}

func (b *Books) past(memberID string, now time.Time) billing.Past {
	m, leases := b.Book.Members[memberID], b.Book.Leases[memberID]
	newest := leases.Newest()
	p := billing.Past{Hold: b.Book.Holds[memberID], LastLease: newest.No, CoveredSince: newest.CoveredSince}
	since := m.OpenedAt
	running := b.Book.Billed[billing.TimeKey{MemberID: memberID, Meter: protocol.MeterSessionSeconds}]
	if running != nil && len(running.Spans()) > 0 {
		if end := running.Spans()[len(running.Spans())-1].To; end.After(since) {
			since = end
		}
	}
	var unreported []billing.Lease
	for _, l := range leases.All() {
		if l.ExpiresAt.After(since) {
			unreported = append(unreported, l)
		}
	}
	p.SetUnreported(*m, since, now, unreported)
	if !b.Faults.NoSuspendedCost {
		quantities := map[string]int64{}
		for meter, total := range b.Members[memberID].Suspended {
			quantities[meter] = total.Quantity
		}
		p.SuspendedNanos = billing.SuspendedCost(b.Prices, quantities)
	}
	return p
}

func (b *Books) keepLease(l billing.Lease, lacks int64) error {
	a := b.Members[l.MemberID]
	b.Book.Leases[l.MemberID] = billing.NewLeases(append(slices.Clone(b.Book.Leases[l.MemberID].All()), l))
	a.AtLease = a.Suspended[protocol.MeterSessionSeconds].Quantity
	if lacks == 0 {
		return nil
	}
	h := b.Book.Holds[l.MemberID]
	h.Placed += lacks
	b.Book.Holds[l.MemberID] = h
	return b.post(billing.Transfer(billing.WalletAccount(a.Org), billing.HoldAccount(l.MemberID), b.Currency, lacks))
}

// RecoverLease takes over a lease that a node kept and that these books have forgotten; ok is false where they know it.
func (b *Books) RecoverLease(in *protocol.Lease) (l billing.Lease, ok bool, err error) {
	m := b.Book.Members[in.GetMemberId()]
	if m == nil || !m.ClosedAt.IsZero() || int64(in.GetLeaseNo()) <= b.Lease(m.ID).No {
		return l, false, nil
	}
	l, lacks := billing.RecoverLease(*m, b.Lease(m.ID), b.Book.Holds[m.ID], in)
	for i := range l.Prices {
		for _, p := range b.Prices {
			if p.PriceID == l.Prices[i].PriceID {
				l.Prices[i].HostBasisPoints = p.HostBasisPoints
			}
		}
	}
	if l.IssuedAt.Before(m.OpenedAt) {
		m.OpenedAt = l.IssuedAt
	}
	return l, true, b.keepLease(l, min(lacks, b.Wallet(b.Members[m.ID].Org)))
}

// Post bills a segment. Records that were posted before must have been taken out of it.
func (b *Books) Post(nodeID, incarnation string, seg *protocol.UsageSegment, now time.Time) (*billing.Batch, error) {
	all, err := billing.ReadRecords(nodeID, incarnation, seg)
	if err != nil {
		return nil, err
	}
	records := make([]*billing.Record, len(all))
	for i := range all {
		records[i] = &all[i]
	}
	book := b.Book
	if b.Faults.NoClip {
		book = b.unbounded(records)
	}
	book.Prepare(records)
	charged, err := book.Charge(now, records)
	if err != nil {
		return nil, err
	}
	for id, f := range charged.Finals {
		b.Members[id].Final = f
	}
	for k, s := range charged.SuspendedTotals() {
		total := b.Members[k.MemberID].Suspended
		total[k.Meter] = total[k.Meter].Add(s)
	}
	for _, c := range charged.Charges {
		if err := b.postCharge(b.Book.Members[c.Key.MemberID].NodeID, c); err != nil {
			return nil, err
		}
	}
	return charged, nil
}

// unbounded is the book with members and leases that allow everything.
func (b *Books) unbounded(records []*billing.Record) *billing.Book {
	book := *b.Book
	book.Members, book.Leases = map[string]*billing.Member{}, map[string]billing.Leases{}
	for _, r := range records {
		m := b.Book.Members[r.MemberID]
		if m == nil || len(b.Book.Leases[m.ID].All()) == 0 {
			continue
		}
		l := b.Lease(m.ID)
		l.IssuedAt, l.ExpiresAt = l.IssuedAt.AddDate(-1, 0, 0), l.ExpiresAt.AddDate(1, 0, 0)
		book.Members[m.ID] = &billing.Member{ID: m.ID, NodeID: m.NodeID}
		book.Leases[m.ID] = billing.NewLeases([]billing.Lease{l})
	}
	return &book
}

func (b *Books) postCharge(nodeID string, c billing.Charge) error {
	paid, writtenOff := billing.UsageLegs(c.Key.MemberID, nodeID, b.Currency, c.Delta)
	if len(paid) > 2 && b.Faults.NoHostLeg {
		paid = paid[:2]
	}
	if len(paid) > 0 {
		if err := b.post(paid); err != nil {
			return err
		}
	}
	if len(writtenOff) > 0 {
		return b.post(writtenOff)
	}
	return nil
}

// RenewNow reports whether usage in suspense uses up a member's newest lease, so that the next one is due at once.
func (b *Books) RenewNow(memberID string) bool {
	a := b.Members[memberID]
	return billing.DueNow(a.Suspended[protocol.MeterSessionSeconds].Quantity, a.AtLease)
}

// Close ends a member's claim. The rest of the hold goes back with the node's final record, or at once where the member
// never had a lease.
func (b *Books) Close(memberID string, at, now time.Time) error {
	m := b.Book.Members[memberID]
	if !m.ClosedAt.IsZero() {
		return nil
	}
	m.ClosedAt = billing.CloseAt(m.OpenedAt, at, now)
	if b.Lease(memberID).No == 0 {
		return b.Settle(memberID)
	}
	return nil
}

// SettleFinal settles a closed member once its final record is posted; postedTo is the number up to which the records
// of the final record's store are posted.
func (b *Books) SettleFinal(memberID string, postedTo int64) error {
	if b.IsOpen(memberID) || !b.Members[memberID].Final.Posted(postedTo) {
		return nil
	}
	return b.Settle(memberID)
}

// Settle gives what is left of a closed member's hold back to the wallet.
func (b *Books) Settle(memberID string) error {
	a, h := b.Members[memberID], b.Book.Holds[memberID]
	if a.Settled {
		return nil
	}
	a.Settled = true
	rest := h.Balance()
	if rest == 0 {
		return nil
	}
	h.Released += rest
	b.Book.Holds[memberID] = h
	return b.post(billing.Transfer(billing.HoldAccount(memberID), billing.WalletAccount(a.Org), b.Currency, rest))
}

func (b *Books) post(legs []billing.Leg) error {
	if err := billing.Balanced(legs); err != nil {
		return err
	}
	b.Postings++
	for _, l := range legs {
		b.Balances[l.Account] += l.Nanos
	}
	return nil
}
