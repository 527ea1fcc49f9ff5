package sim

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// truth is what really happened, as nobody in the world can know it: the checker holds hub and nodes against it.
type truth struct {
	w       *World
	members map[string]*memberTruth
	// order of members is that of their making.
	order []*memberTruth
	gpus  map[string]*busyTime
}

// busyTime adds up how long something ran.
type busyTime struct {
	live   int
	since  instant
	ran    instant
	lost   instant
	billed int64
}

func (b *busyTime) total(now instant) instant {
	if b.live > 0 {
		return b.ran + now - b.since
	}
	return b.ran
}

type memberTruth struct {
	busyTime
	id   string
	node int
	// wanted, stopped and revision are what its user has asked for last.
	wanted, stopped bool
	revision        uint64
	// mood is the chance that a container of it exits by itself.
	mood   float64
	thin   bool
	starts int
	leases []rating.Interval
	// unsure says that time may have been lost for reasons that the laws allow: a clock that lied, a disk that was put
	// back.
	unsure       bool
	accelerators []string
}

func newTruth(w *World) truth {
	return truth{w: w, members: map[string]*memberTruth{}, gpus: map[string]*busyTime{}}
}

func (t *truth) asked(m *memberRow, mood float64) {
	x := &memberTruth{
		id: m.id, node: m.node, wanted: true, revision: 1, mood: mood, thin: thin(m.org),
		accelerators: m.accelerators,
	}
	x.leases = append(x.leases, t.w.hub.rows.books.Lease(m.id).Window())
	t.members[m.id], t.order = x, append(t.order, x)
}

func (t *truth) moodOf(id string) float64 { return t.members[id].mood }

func (t *truth) gpu(id string) *busyTime {
	b := t.gpus[id]
	if b == nil {
		b = &busyTime{}
		t.gpus[id] = b
	}
	return b
}

func (t *truth) started(n *node, c *container) {
	m := t.members[c.memberID]
	m.starts++
	m.unsure = m.unsure || n.clockFaulty
	m.begin(t.w.now)
	// A claim is used while any container of its member runs: that is what running time means.
	for _, id := range m.accelerators {
		t.gpu(id).begin(t.w.now)
	}
}

func (b *busyTime) begin(now instant) {
	if b.live++; b.live == 1 {
		b.since = now
	}
}

func (b *busyTime) end(now instant) {
	if b.live--; b.live == 0 {
		b.ran += now - b.since
	}
}

func (t *truth) ended(n *node, c *container, seen bool) {
	m := t.members[c.memberID]
	m.end(t.w.now)
	if !seen {
		m.lost += t.w.now - n.lastBeat
	}
	for _, id := range m.accelerators {
		t.gpu(id).end(t.w.now)
	}
}

func (t *truth) doubt(n *node) {
	for _, m := range t.order {
		m.unsure = m.unsure || m.node == n.i
	}
}

func (t *truth) leased(m *memberRow, l billing.Lease) {
	if x := t.members[m.id]; x != nil {
		x.leases = rating.Union(append(x.leases, l.Window()))
	}
}

func (t *truth) failed(m *memberRow) { t.members[m.id].stopped = m.stopped() }

// claimed checks law 14 at the moment when an accelerator is given.
func (t *truth) claimed(n *node, m *memberRow, id string) {
	if holder := t.w.hub.rows.nodes[n.i].claims[id]; holder != "" {
		t.w.fail(14, "accelerator %s is given to %s and is %s's", id, m.id, holder)
	}
	for _, c := range n.containers {
		if c.status == agent.Running && slices.Contains(c.accelerators, id) && !n.excused && !t.members[c.memberID].unsure {
			t.w.fail(14, "accelerator %s is given to %s while %s runs on it", id, m.id, c.memberID)
		}
	}
}

// applied checks law 2 after a node has accepted a state.
func (t *truth) applied(n *node) {
	s := n.store
	next := appliedState{s.state.GetEpoch(), s.state.GetGeneration(), s.digest}
	was := s.highest
	switch {
	case next.epoch < was.epoch || next.epoch == was.epoch && next.generation < was.generation:
		t.w.fail(2, "node %s went from generation %d back to %d", n.id, was.generation, next.generation)
	case next.epoch == was.epoch && next.generation == was.generation && next.digest != was.digest:
		t.w.fail(2, "node %s took other content under generation %d", n.id, next.generation)
	}
	s.highest = next
}

// stopping checks laws 3 and 16: nothing is stopped that its user wants and its lease covers.
func (t *truth) stopping(n *node, a agent.StopContainer) {
	m := t.members[a.MemberID]
	c := n.containerOf(a.ContainerID)
	if n.excused || c == nil || c.status != agent.Running || !m.wanted {
		return
	}
	law := 3
	if t.w.hub.backup != nil && t.w.result.Faults["hub restored"] > 0 {
		law = 16
	}
	lease, now := n.store.leases[a.MemberID], t.w.now.time()
	switch a.Why {
	case "left_state":
		t.w.fail(law, "%s was stopped on %s: it has left the state, and nobody asked for that", a.MemberID, n.id)
	case "stopped":
		if !m.stopped {
			t.w.fail(law, "%s was stopped on %s, and nobody asked for that", a.MemberID, n.id)
		}
	case "replaced":
		for _, w := range n.store.desired().Workloads {
			if w.MemberID == a.MemberID && w.Revision <= c.revision {
				t.w.fail(law, "%s revision %d was replaced by %d", a.MemberID, c.revision, w.Revision)
			}
		}
	case "lease_ended":
		covered := now.Add(time.Second).Before(lease.GetExpiresAt().AsTime())
		if covered && !n.clockFaulty && !m.thin && !m.unsure {
			t.w.fail(law, "%s was stopped on %s although lease %d covers it until %s", a.MemberID, n.id, lease.GetLeaseNo(),
				lease.GetExpiresAt().AsTime())
		}
		if !m.thin && n.up.no != 0 && t.w.hub.up && t.w.now-n.up.since > 30*minute && !n.clockFaulty {
			t.w.fail(law, "%s was stopped on %s: its lease %d ended, while the hub was there to renew it (%s)", a.MemberID, n.id,
				lease.GetLeaseNo(), t.hubSays(n, a.MemberID))
		}
	default:
		t.w.fail(law, "%s was stopped on %s: %s", a.MemberID, n.id, a.Why)
	}
}

// coldBoot checks law 3 some minutes after a boot without the hub: what is leased runs again.
func (t *truth) coldBoot(n *node) {
	now := n.now()
	for _, w := range n.store.desired().Workloads {
		l, m := n.store.agentLeases()[w.MemberID], n.store.members[w.MemberID]
		if w.Stopped || !l.Covers(now) || m.FailedRevision == w.Revision || !n.images[w.Services[0].Image] || n.clockFaulty ||
			t.members[w.MemberID].mood > 0 {
			continue
		}
		if !slices.ContainsFunc(n.containers, func(c *container) bool {
			return c.memberID == w.MemberID && c.status == agent.Running
		}) {
			t.w.fail(3, "%s does not run on %s after a cold boot without the hub, though lease %d covers it", w.MemberID, n.id,
				l.No)
		}
	}
}

// billed checks law 5 for a stretch of time that the hub has just accepted.
func (t *truth) billed(m *memberRow, p rating.Interval, quantity int64) {
	s, x := &m.audit, t.members[m.id]
	if len(rating.Intersect(p, s.seen)) > 0 {
		t.w.fail(5, "%s is billed twice for %s to %s", m.id, p.From, p.To)
	}
	if n := len(s.seen); n > 0 && s.seen[n-1].To.Equal(p.From) {
		s.seen[n-1].To = p.To
	} else {
		s.seen = rating.Union(append(s.seen, p))
	}
	if rest := rating.Subtract(p, x.leases); len(rest) > 0 {
		t.w.fail(5, "%s is billed outside its leases: %s to %s", m.id, rest[0].From, rest[0].To)
	}
	if quantity != p.Length() {
		t.w.fail(5, "%s is billed %d for %d µs", m.id, quantity, p.Length())
	}
	s.billed += quantity
}

// check holds the healed world against the laws.
func (t *truth) check() {
	t.money()
	t.time()
	for _, n := range t.w.nodes {
		t.converged(n)
	}
}

// money is law 6, and the part of law 7 that follows.
func (t *truth) money() {
	b := t.w.hub.rows.books
	var sum int64
	for account, nanos := range b.Balances {
		if strings.HasPrefix(account, billing.WalletAccount("")) && nanos < 0 {
			t.w.fail(7, "%s is at %d", account, nanos)
		}
		sum += nanos
	}
	if sum != 0 {
		t.w.fail(6, "all accounts sum to %d", sum)
	}
	for i := range t.w.hub.rows.nodes {
		for _, m := range t.w.hub.rows.nodes[i].members {
			t.hold(m, t.sumHours(m.id))
		}
	}
}

// sumHours checks the charge of each hour of a member's running time and adds them up.
func (t *truth) sumHours(memberID string) (total rating.Accrual) {
	b := t.w.hub.rows.books
	p := b.Prices[0]
	for _, h := range b.Book.Hours[memberID] {
		if h.Meter != p.Meter {
			continue
		}
		if charged, err := rating.Charge(p.Nanos, p.PerQuantity, h.Quantity); err != nil || charged != h.ChargedNanos ||
			h.ChargedNanos != h.CollectedNanos+h.WrittenOffNanos {
			t.w.fail(6, "an hour of %s is charged %d for %d", memberID, h.ChargedNanos, h.Quantity)
		}
		total.Quantity += h.Quantity
		total.CollectedNanos += h.CollectedNanos
	}
	return total
}

// hold checks that a member's hold, its account and its hours say the same.
func (t *truth) hold(m *memberRow, hours rating.Accrual) {
	b := t.w.hub.rows.books
	h := b.Book.Holds[m.id]
	if account := b.Balances[billing.HoldAccount(m.id)]; account != h.Balance() || account < 0 {
		t.w.fail(6, "the hold of %s says %d, its account %d", m.id, h.Balance(), account)
	}
	if hours.CollectedNanos != h.Posted || hours.Quantity != m.audit.billed {
		t.w.fail(6, "%s has %d collected and %d posted, %d accrued and %d billed", m.id, hours.CollectedNanos, h.Posted,
			hours.Quantity, m.audit.billed)
	}
}

// time is laws 5 and 17: nothing billed that did not run, nothing lost that was measured.
func (t *truth) time() {
	for _, b := range t.gpus {
		b.billed = 0
	}
	t.w.result.BilledSeconds, t.w.result.RanSeconds = 0, 0
	for i := range t.w.hub.rows.nodes {
		for _, m := range t.w.hub.rows.nodes[i].members {
			t.memberTime(m)
		}
	}
	for i := range t.w.nodes {
		for _, id := range t.w.nodes[i].accelerators {
			if b := t.gpu(id); b.billed > int64(b.total(t.w.now)) {
				t.w.fail(17, "accelerator %s is billed %s and was used %s", id, instant(b.billed).dur(), b.total(t.w.now).dur())
			}
		}
	}
}

func (t *truth) memberTime(m *memberRow) {
	x, s := t.members[m.id], &m.audit
	ran := x.total(t.w.now)
	t.w.result.BilledSeconds += s.billed / int64(second)
	t.w.result.RanSeconds += int64(ran / second)
	if s.billed > int64(ran) {
		t.w.fail(17, "%s is billed %s and ran %s", m.id, instant(s.billed).dur(), ran.dur())
	}
	for _, id := range x.accelerators {
		t.gpu(id).billed += s.billed
	}
	if x.unsure || s.lostLeases {
		return
	}
	if slack := x.lost + 100*second; s.billed+s.suspended < int64(ran-min(slack, ran)) {
		t.w.fail(5, "%s ran %s, of which %s are lost: billed %s, suspended %s", m.id, ran.dur(), x.lost.dur(),
			instant(s.billed).dur(), instant(s.suspended).dur())
	}
}

// converged is law 13: hub and node agree on everything, and there is nothing left to do.
func (t *truth) converged(n *node) {
	row := &t.w.hub.rows.nodes[n.i]
	stuck := func(format string, args ...any) {
		t.w.fail(13, "node %s after the fault: %s", n.id, fmt.Sprintf(format, args...))
	}
	s := n.store
	switch {
	case !n.agentUp || n.up.no == 0 || n.up.no != row.sessionNo || t.w.hub.sessions[n.i] == nil:
		stuck("no session")
		return
	case row.waits:
		stuck("the restored hub still waits for it")
	case row.head.rev != row.rev || s.digest != row.head.digest:
		stuck("it holds generation %d, the hub has %d", s.state.GetGeneration(), row.head.generation)
	}
	for number := s.marks.Posted + 1; number <= s.chain.Number; number++ {
		if sealed := s.segments[number]; t.w.now.time().Sub(sealed.Segment.GetSealedAt().AsTime()) > time.Minute {
			stuck("segment %d of %s is not posted, %d are", number, s.incarnation, s.marks.Posted)
			break
		}
	}
	now := n.now()
	desired, leases, observed := s.desired(), s.agentLeases(), n.observe(now)
	observed.Busy = nil
	for _, a := range agent.Diff(desired, leases, observed, now) {
		if m := t.members[agent.MemberOf(a)]; m.mood == 0 && !m.thin {
			stuck("%T of %s is still to be done", a, agent.MemberOf(a))
		}
	}
	t.sameView(n, row, stuck)
}

func (t *truth) sameView(n *node, row *nodeRow, stuck func(string, ...any)) {
	for _, m := range row.members {
		x := t.members[m.id]
		mine, known := n.store.members[m.id]
		switch {
		case m.Gone:
			if n.networks[m.id] || slices.ContainsFunc(n.containers, func(c *container) bool { return c.memberID == m.id }) {
				stuck("the hub counts %s as gone, and something of it is there", m.id)
			}
		case !m.Desired:
			stuck("%s was asked to go and is not gone (known on the node: %t, proof: %t)", m.id, known, mine.Removal != nil)
		case x.mood == 0 && !x.thin:
			t.sameStatus(n, m, stuck)
		}
		issued := t.w.hub.rows.books.Lease(m.id)
		if l := n.store.leases[m.id]; m.Desired && !x.thin && l.GetLeaseNo() != uint64(issued.No) {
			stuck("%s has lease %d on the node, the hub has issued %d", m.id, l.GetLeaseNo(), issued.No)
		}
	}
}

func (t *truth) sameStatus(n *node, m *memberRow, stuck func(string, ...any)) {
	for _, s := range n.report {
		if s.GetMemberId() != m.id {
			continue
		}
		if s.GetStatus() != m.Status || int64(s.GetRevision()) != m.ObservedRevision ||
			m.ObservedRevision != int64(m.revision) {
			stuck("%s is %s at revision %d, the hub thinks %s at %d of %d", m.id, s.GetStatus(), s.GetRevision(), m.Status,
				m.ObservedRevision, m.revision)
		}
		return
	}
	stuck("%s is wanted and unknown on the node", m.id)
}

func (t *truth) hubSays(n *node, memberID string) string {
	m := t.w.hub.rows.nodes[n.i].member(memberID)
	if m == nil {
		return "the hub does not know it"
	}
	l, p := t.w.hub.rows.books.Lease(memberID), t.w.hub.rows.books.Prices[0]
	used := instant(n.store.consumed[memberID][protocol.MeterSessionSeconds]).dur()
	return fmt.Sprintf("the hub has lease %d until %s for %s, used %s, billed %s, suspended %s, leases lost %t", l.No,
		l.ExpiresAt.Format(time.RFC3339), instant(rating.Affords(p.Nanos, p.PerQuantity, l.CapNanos)).dur(), used,
		instant(m.audit.billed).dur(), instant(m.audit.suspended).dur(), m.audit.lostLeases)
}
