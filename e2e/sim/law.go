package sim

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/rating"
	"github.com/gpuaas/gpuaas/protocol"
)

// oracle records what happened in the world, and checks hub and nodes against it.
type oracle struct {
	w       *World
	members map[string]*memberFacts
	// order holds the members as they were created.
	order []*memberFacts
	gpus  map[string]*busyTime
	// forgotten is what a restored hub knows nothing of: from its backup to the restore.
	forgotten []window
	// restores has, by the digest of a signed state, how often the hub had been restored before.
	restores map[[sha256.Size]byte]int
}

// busyTime adds up how long something ran.
type busyTime struct {
	live int
	// spans are when it ran, without the one that has not ended.
	spans  []window
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

type memberFacts struct {
	busyTime
	id   string
	node int
	// wanted, stopped and revision are what the user asked for last.
	wanted, stopped bool
	revision        uint64
	// crashChance is the chance that a container of it exits by itself.
	crashChance  float64
	lowFunds     bool
	starts       int
	leases       []rating.Interval
	accelerators []string
	versionFacts
}

func newOracle(w *World) oracle {
	return oracle{
		w: w, members: map[string]*memberFacts{}, gpus: map[string]*busyTime{}, restores: map[[sha256.Size]byte]int{},
	}
}

func (o *oracle) asked(m *memberRow, crashChance float64) {
	x := &memberFacts{
		id: m.id, node: m.node, wanted: true, revision: 1, crashChance: crashChance, lowFunds: lowFunds(m.org),
		accelerators: m.accelerators, versionFacts: newVersionFacts(),
	}
	x.leases = append(x.leases, o.w.hub.rows.books.Lease(m.id).Window())
	o.members[m.id], o.order = x, append(o.order, x)
}

func (o *oracle) crashChanceOf(id string) float64 { return o.members[id].crashChance }

func (o *oracle) gpu(id string) *busyTime {
	b := o.gpus[id]
	if b == nil {
		b = &busyTime{}
		o.gpus[id] = b
	}
	return b
}

func (o *oracle) started(c *container) {
	m := o.members[c.MemberID]
	m.starts++
	m.begin(o.w.now)
	// A claim is used while any container of its member runs: that is what running time means.
	for _, id := range m.accelerators {
		o.gpu(id).begin(o.w.now)
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
		b.spans = append(b.spans, window{b.since, now})
	}
}

func (o *oracle) ended(n *node, c *container, seen bool) {
	m := o.members[c.MemberID]
	m.end(o.w.now)
	if !seen {
		m.lost += o.w.now - n.lastSample
	}
	for _, id := range m.accelerators {
		o.gpu(id).end(o.w.now)
	}
}

func (o *oracle) leased(m *memberRow, l billing.Lease) {
	if x := o.members[m.id]; x != nil {
		x.leases = rating.Union(append(x.leases, l.Window()))
	}
}

func (o *oracle) failed(m *memberRow) { o.members[m.id].stopped = m.stopped() }

// claimed checks law 14 at the moment when an accelerator is given.
func (o *oracle) claimed(n *node, m *memberRow, id string) {
	if holder := o.w.hub.rows.nodes[n.i].claims[id]; holder != "" {
		o.w.fail(14, "accelerator %s is given to %s and is %s's", id, m.id, holder)
	}
	if other := o.w.hub.rows.nodes[n.i].neighbour(m.org, id); other != "" {
		o.w.fail(14, "slice %s is given to %s of org %d while %s of another org has one of the GPU", id, m.id, m.org, other)
	}
	mine := &container{Listed: agent.Listed{AcceleratorIDs: []string{id}}, org: strconv.Itoa(m.org)}
	for _, c := range n.containers {
		uses := slices.Contains(c.AcceleratorIDs, id) || n.beside(mine, []*container{c}) != nil
		if c.Status == agent.Running && uses && !n.doubt.isOpen() {
			o.w.fail(14, "accelerator %s is given to %s while %s runs on it", id, m.id, c.MemberID)
		}
	}
}

// applied checks law 2 after a node has accepted a state.
func (o *oracle) applied(n *node) {
	s := n.store
	next := appliedState{s.State.GetEpoch(), s.State.GetGeneration(), s.Digest, o.restores[s.Digest]}
	was := s.highest
	switch {
	case next.epoch < was.epoch || next.epoch == was.epoch && next.generation < was.generation:
		o.w.fail(2, "node %s went from generation %d back to %d", n.id, was.generation, next.generation)
	case next.restores < was.restores:
		o.w.fail(2, "node %s took generation %d of the hub before restore %d after one of the restored hub", n.id,
			next.generation, was.restores)
	case next.epoch == was.epoch && next.generation == was.generation && next.digest != was.digest:
		o.w.fail(2, "node %s took other content under generation %d", n.id, next.generation)
	}
	s.highest = next
}

// signed notes after how many restores of the hub a state was signed.
func (o *oracle) signed(s head) { o.restores[s.digest] = o.w.hub.restores }

// refused notes that a node refuses what a hub signed that it knows to be lost.
func (o *oracle) refused(n *node, env *protocol.Envelope) {
	if o.restores[sha256.Sum256(env.GetPayload())] < n.store.highest.restores {
		n.refusedOld++
	}
}

// stopping checks laws 3 and 16: nothing is stopped that its user wants and its lease covers.
func (o *oracle) stopping(n *node, a agent.StopContainer) {
	m := o.members[a.MemberID]
	c := n.containerOf(a.ContainerID)
	if n.diskRestored || c == nil || c.Status != agent.Running || !m.wanted {
		return
	}
	law := 3
	if o.w.hub.backup != nil && o.w.result.Faults["hub restored"] > 0 {
		law = 16
	}
	lease, now := n.store.Leases[a.MemberID], o.w.now.time()
	switch a.Why {
	case "left_state":
		o.w.fail(law, "%s was stopped on %s: it has left the state, and nobody asked for that", a.MemberID, n.id)
	case "stopped":
		if !m.stopped {
			o.w.fail(law, "%s was stopped on %s, and nobody asked for that", a.MemberID, n.id)
		}
	case "refused":
		if !n.refuses(appOf(c.image)) {
			o.w.fail(law, "%s was stopped on %s: it is refused, and not by the owner", a.MemberID, n.id)
		}
	case "replaced":
		if o.w.cfg.Versions {
			o.replacing(law, n, c)
			return
		}
		for _, w := range n.store.Desired().Workloads {
			if w.MemberID == a.MemberID && w.Revision <= c.Revision {
				o.w.fail(law, "%s revision %d was replaced by %d", a.MemberID, c.Revision, w.Revision)
			}
		}
	case "lease_ended":
		covered := now.Add(time.Second).Before(lease.GetExpiresAt().AsTime())
		issued := since(lease.GetExpiresAt().AsTime()) - instant(lease.GetDurationSeconds())*second
		// What the node has counted twice, or at a wrong time, uses up the lease's cap. The lease that a restored hub issues
		// first does not count the usage that is sent again; the next one does, where the hub is there to issue it.
		short := !o.w.hub.up && o.recoveredAt(n, a.MemberID, issued)
		if covered && !m.lowFunds && !n.doubt.within(window{issued, o.w.now + 1}) && !short {
			o.w.fail(law, "%s was stopped on %s although lease %d covers it until %s (%s)", a.MemberID, n.id,
				lease.GetLeaseNo(), lease.GetExpiresAt().AsTime(), o.hubSays(n, a.MemberID))
		}
		if !m.lowFunds && n.up.no != 0 && o.w.hub.up && o.w.now-n.up.since > 30*minute && !n.clockFaulty {
			o.w.fail(law, "%s was stopped on %s: its lease %d ended, while the hub was there to renew it (%s)", a.MemberID, n.id,
				lease.GetLeaseNo(), o.hubSays(n, a.MemberID))
		}
	default:
		o.w.fail(law, "%s was stopped on %s: %s", a.MemberID, n.id, a.Why)
	}
}

// recoveredAt reports whether a restored hub took over leases of the member just before a time.
func (o *oracle) recoveredAt(n *node, memberID string, at instant) bool {
	m := o.w.hub.rows.nodes[n.i].member(memberID)
	return m != nil && slices.ContainsFunc(m.audit.lostLeases, func(lost window) bool {
		return lost.to <= at && at-lost.to < minute
	})
}

// coldBoot checks law 3 some minutes after a boot without the hub: what is leased runs again.
func (o *oracle) coldBoot(n *node) {
	now := n.now()
	for _, w := range n.desired().Workloads {
		l, m := n.store.AgentLeases()[w.MemberID], n.store.Members[w.MemberID]
		if w.Stopped || o.w.cfg.Versions && o.mayWait(w) || !l.Covers(now) || m.Tried(w.Revision) ||
			!n.images[w.Services[0].Images[0]] || n.clockFaulty || o.members[w.MemberID].crashChance > 0 {
			continue
		}
		if !slices.ContainsFunc(n.containers, func(c *container) bool {
			return c.MemberID == w.MemberID && c.Status == agent.Running
		}) {
			o.w.fail(3, "%s does not run on %s after a cold boot without the hub, though lease %d covers it", w.MemberID, n.id,
				l.No)
		}
	}
}

// billed checks law 5 for a span that the hub bills.
func (o *oracle) billed(m *memberRow, p rating.Interval, quantity int64) {
	s, x := &m.audit, o.members[m.id]
	if len(rating.Intersect(p, s.seen)) > 0 {
		o.w.fail(5, "%s is billed twice for %s to %s", m.id, p.From, p.To)
	}
	if n := len(s.seen); n > 0 && s.seen[n-1].To.Equal(p.From) {
		s.seen[n-1].To = p.To
	} else {
		s.seen = rating.Union(append(s.seen, p))
	}
	if rest := rating.Subtract(p, x.leases); len(rest) > 0 {
		o.w.fail(5, "%s is billed outside its leases: %s to %s", m.id, rest[0].From, rest[0].To)
	}
	if quantity != p.Length() {
		o.w.fail(5, "%s is billed %d for %d µs", m.id, quantity, p.Length())
	}
	s.billed += quantity
}

// check checks the laws that hold at rest.
func (o *oracle) check() {
	o.money()
	o.reserved()
	o.time()
	for _, n := range o.w.nodes {
		o.converged(n)
	}
}

// money is law 6, and the part of law 7 that follows.
func (o *oracle) money() {
	b := o.w.hub.rows.books
	var sum int64
	for account, nanos := range b.Balances {
		if strings.HasPrefix(account, billing.WalletAccount("")) && nanos < 0 {
			o.w.fail(7, "%s is at %d", account, nanos)
		}
		sum += nanos
	}
	if sum != 0 {
		o.w.fail(6, "all accounts sum to %d", sum)
	}
	for i := range o.w.hub.rows.nodes {
		for _, m := range o.w.hub.rows.nodes[i].members {
			o.hold(m, o.sumHours(m.id))
		}
	}
}

// sumHours checks the charge of each hour of a member's running time and adds them up.
func (o *oracle) sumHours(memberID string) (total rating.Accrual) {
	b := o.w.hub.rows.books
	p := b.Prices[0]
	for _, h := range b.Book.Hours[memberID] {
		if h.Meter != p.Meter {
			continue
		}
		if charged, err := rating.Charge(p.Nanos, p.PerQuantity, h.Quantity); err != nil || charged != h.ChargedNanos ||
			h.ChargedNanos != h.CollectedNanos+h.WrittenOffNanos {
			o.w.fail(6, "an hour of %s is charged %d for %d", memberID, h.ChargedNanos, h.Quantity)
		}
		total.Quantity += h.Quantity
		total.CollectedNanos += h.CollectedNanos
	}
	return total
}

// hold checks that a member's hold, its account and its hours say the same.
func (o *oracle) hold(m *memberRow, hours rating.Accrual) {
	b := o.w.hub.rows.books
	h := b.Book.Holds[m.id]
	o.w.result.Checked[6]++
	if account := b.Balances[billing.HoldAccount(m.id)]; account != h.Balance() || account < 0 {
		o.w.fail(6, "the hold of %s says %d, its account %d", m.id, h.Balance(), account)
	}
	if hours.CollectedNanos != h.Posted || hours.Quantity != m.audit.billed {
		o.w.fail(6, "%s has %d collected and %d posted, %d accrued and %d billed", m.id, hours.CollectedNanos, h.Posted,
			hours.Quantity, m.audit.billed)
	}
}

// time is laws 5 and 17: nothing billed that did not run, nothing lost that was measured.
func (o *oracle) time() {
	for _, b := range o.gpus {
		b.billed = 0
	}
	o.w.result.BilledSeconds, o.w.result.RanSeconds = 0, 0
	for i := range o.w.hub.rows.nodes {
		for _, m := range o.w.hub.rows.nodes[i].members {
			o.memberTime(m)
		}
	}
	for i := range o.w.nodes {
		for _, id := range o.w.nodes[i].accelerators {
			if b := o.gpu(id); b.billed > int64(b.total(o.w.now)) {
				o.w.fail(17, "accelerator %s is billed %s and was used %s", id, instant(b.billed).dur(), b.total(o.w.now).dur())
			}
		}
	}
}

func (o *oracle) memberTime(m *memberRow) {
	x, s := o.members[m.id], &m.audit
	ran := x.total(o.w.now)
	o.w.result.BilledSeconds += s.billed / int64(second)
	o.w.result.RanSeconds += int64(ran / second)
	if s.billed > int64(ran) {
		o.w.fail(17, "%s is billed %s and ran %s", m.id, instant(s.billed).dur(), ran.dur())
	}
	o.w.result.Checked[17]++
	for _, id := range x.accelerators {
		o.gpu(id).billed += s.billed
	}
	spans := x.spans
	if x.live > 0 {
		spans = append(slices.Clone(spans), window{x.since, o.w.now})
	}
	explained := o.w.nodes[m.node].doubt.explained(spans, s.lostLeases, o.w.now)
	o.w.result.Checked[5]++
	o.w.result.ExplainedSeconds += int64(explained / second)
	o.w.result.SuspendedSeconds += s.suspended / int64(second)
	if slack := explained + x.lost + 100*second; s.billed+s.suspended < int64(ran-min(slack, ran)) {
		o.w.fail(5, "%s ran %s, of which %s are lost and faults explain %s: billed %s, suspended %s", m.id, ran.dur(),
			x.lost.dur(), explained.dur(), instant(s.billed).dur(), instant(s.suspended).dur())
	}
}

// converged is law 13: hub and node agree on everything, and there is nothing left to do.
func (o *oracle) converged(n *node) {
	row := &o.w.hub.rows.nodes[n.i]
	stuck := func(format string, args ...any) {
		o.w.fail(13, "node %s after the fault: %s", n.id, fmt.Sprintf(format, args...))
	}
	s := n.store
	switch {
	case !n.agentUp || n.up.no == 0 || n.up.no != row.sessionNo || o.w.hub.sessions[n.i] == nil:
		stuck("no session")
		return
	case row.awaitsResync:
		stuck("it has not uploaded its state to the restored hub")
	case row.head.rev != row.rev || s.Digest != row.head.digest:
		stuck("it holds generation %d, the hub has %d", s.State.GetGeneration(), row.head.generation)
	}
	for number := s.Marks.Posted + 1; number <= s.Chain.Number; number++ {
		if sealed := s.Segments[number]; o.w.now.time().Sub(sealed.Segment.GetSealedAt().AsTime()) > time.Minute {
			stuck("segment %d of %s is not posted, %d are", number, s.Incarnation(), s.Marks.Posted)
			break
		}
	}
	if s.Bundle.Version() != o.w.hub.rows.bundle.Version() || s.State.GetEpoch() != s.Bundle.Epoch() {
		stuck("it has trust bundle %d and a state of epoch %d, the hub has bundle %d", s.Bundle.Version(),
			s.State.GetEpoch(), o.w.hub.rows.bundle.Version())
	}
	if n.refusedOld > 0 {
		o.w.result.Checked[2]++
	}
	now := n.now()
	desired, leases, observed := n.desired(), s.AgentLeases(), n.observe(now)
	observed.Busy = nil
	for _, a := range agent.Diff(desired, leases, observed, now) {
		if m := o.members[agent.MemberOf(a)]; m.crashChance == 0 && !m.lowFunds {
			stuck("%T of %s is still to be done", a, agent.MemberOf(a))
		}
	}
	o.sameView(n, row, stuck)
	o.w.result.Checked[13]++
	if o.w.result.Faults["hub restored"] > 0 {
		o.w.result.Checked[16]++
	}
}

func (o *oracle) sameView(n *node, row *nodeRow, stuck func(string, ...any)) {
	for _, m := range row.members {
		o.versionAtRest(n, m)
		x := o.members[m.id]
		mine, known := n.store.Members[m.id]
		switch {
		case m.Gone:
			attached := slices.ContainsFunc(n.attachments(), func(a attachment) bool { return a.memberID == m.id })
			if attached || slices.ContainsFunc(n.containers, func(c *container) bool { return c.MemberID == m.id }) {
				stuck("the hub counts %s as gone, and something of it is there", m.id)
			}
		case !m.Desired:
			stuck("%s was asked to go and is not gone (known on the node: %t, proof: %t)", m.id, known, mine.Removal != nil)
		case x.crashChance == 0 && !x.lowFunds:
			o.sameStatus(n, m, stuck)
		}
		issued := o.w.hub.rows.books.Lease(m.id)
		if l := n.store.Leases[m.id]; m.Desired && !x.lowFunds && l.GetLeaseNo() != uint64(issued.No) {
			stuck("%s has lease %d on the node, the hub has issued %d", m.id, l.GetLeaseNo(), issued.No)
		}
	}
}

func (o *oracle) sameStatus(n *node, m *memberRow, stuck func(string, ...any)) {
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

func (o *oracle) hubSays(n *node, memberID string) string {
	m := o.w.hub.rows.nodes[n.i].member(memberID)
	if m == nil {
		return "the hub does not know it"
	}
	l, p := o.w.hub.rows.books.Lease(memberID), o.w.hub.rows.books.Prices[0]
	used := instant(n.store.Consumed[memberID][protocol.MeterSessionSeconds]).dur()
	return fmt.Sprintf("the hub has lease %d until %s for %s, used %s, billed %s, suspended %s, leases lost %v", l.No,
		l.ExpiresAt.Format(time.RFC3339), instant(rating.Affords(p.Nanos, p.PerQuantity, l.CapNanos)).dur(), used,
		instant(m.audit.billed).dur(), instant(m.audit.suspended).dur(), m.audit.lostLeases)
}
