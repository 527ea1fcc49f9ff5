package sim

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// Config is one simulation. Zero values take defaults.
type Config struct {
	Seed  uint64
	Nodes int
	Days  int
	// Quiet is how long a node is left alone while nothing happens.
	Quiet time.Duration
	// Commands and Faults are how many there are for each node and day, on average.
	Commands, Faults float64
	// Lease is the wish of every lease.
	Lease time.Duration
	// Backup is how often the hub is backed up, Restores how often in all it is set back to its last backup.
	Backup   time.Duration
	Restores int
	// Shared is how many of the GPUs are shared in slices, and of the instances ask for one, from 0 to 1.
	Shared float64
	// Versions has users ask for versions of apps with signed manifests, upgrade them and roll them back, and has owners
	// change their policy.
	Versions bool
	// Kinds of faults at nodes; none: all.
	Kinds []string
	// Keep names the steps that are taken; nil: all. Until ends the world earlier; 0: after its days.
	Keep  []string
	Until time.Duration
	// Break makes the model break a law on purpose, so that the checker can be checked.
	Break Breakage
}

// LargeWorld is the world that benchmarks run: many nodes for a month, with few commands and few faults.
func LargeWorld(seed uint64) Config {
	return Config{
		Seed: seed, Nodes: 250, Days: 30, Commands: 0.2, Faults: 0.1, Quiet: 3 * time.Hour,
		Lease: 7 * 24 * time.Hour, Backup: 24 * time.Hour, Restores: 1,
	}
}

// GCPercent lets the heap of a world grow to five times what lives in it: with Go's default, collecting garbage takes a
// fifth of the time.
const GCPercent = 400

// Breakage is a rule left out.
type Breakage string

// The rules that can be left out. Each makes some seed break a law.
const (
	// BreakDedupe posts a record that was posted before once more, under another name.
	BreakDedupe Breakage = "dedupe"
	// BreakOrder lets a node accept an older generation.
	BreakOrder Breakage = "order"
	// BreakIncarnation lets a restored disk go on under its old name.
	BreakIncarnation Breakage = "incarnation"
	// BreakFork notices a restored disk by its numbers only: one that has gone on without the hub is taken for the old
	// one.
	BreakFork Breakage = "fork"
	// BreakRewind does not send again what a restored hub has forgotten.
	BreakRewind Breakage = "rewind"
	// BreakAdopt lets a restored hub compile from its old rows at once.
	BreakAdopt Breakage = "adopt"
	// BreakHub stops everything when the hub is away.
	BreakHub Breakage = "hub_absence"
	// BreakProof frees an accelerator when the decommission is asked for, not when it is proved.
	BreakProof Breakage = "proof"
	// BreakOrgs gives slices of one GPU to two orgs.
	BreakOrgs Breakage = "orgs"
	// BreakTakeover leaves a GPU to the org of the restored rows, beside the one that a newer state gives it to.
	BreakTakeover Breakage = "takeover"
	// BreakNeighbour lets a node start a container beside one of another org on a GPU.
	BreakNeighbour Breakage = "neighbour"
	// BreakClip bills what lies outside lease and claim.
	BreakClip Breakage = "clip"
	// BreakClock bills the time that a clock leaps forward.
	BreakClock Breakage = "clock"
	// BreakCap caps a lease at what is held, as if the node did not count what is in suspense.
	BreakCap Breakage = "cap"
	// BreakSilence waits for ever for the proof of a node whose disk has forgotten the member.
	BreakSilence Breakage = "silence"
	// BreakBalance forgets the host's leg of a posting.
	BreakBalance Breakage = "balance"
	// BreakHold bills what is reserved before its hold is extended.
	BreakHold Breakage = "hold"
	// BreakManifest lets a node run what no publisher signed.
	BreakManifest Breakage = "manifest"
	// BreakOwner lets a node run what its owner refuses.
	BreakOwner Breakage = "owner"
	// BreakRollback rolls back to the revision before, whether it was ready once or not.
	BreakRollback Breakage = "rollback"
	// BreakEpoch lets a restored hub go on in the epoch of the lost one, whose keys stay valid.
	BreakEpoch Breakage = "epoch"
	// BreakRedial dials once only.
	BreakRedial Breakage = "redial"
)

// Result is what a simulation was.
type Result struct {
	Digest   uint64
	Events   int
	Segments int
	Postings int
	Starts   int
	// States counts signed generations, Leases issued ones.
	States, Leases int
	// Faults by kind, for people.
	Faults map[string]int
	// BilledSeconds is the running time that was billed, RanSeconds that of the containers.
	BilledSeconds, RanSeconds int64
	// Steps names those that were taken (steps.go).
	Steps []string
	// Checked counts, by law, what its check at rest compared: members and allocations for law 5, members for law 17,
	// nodes that refused a state of an older epoch for law 2, holds for law 6, nodes for law 13, nodes of a restored hub
	// for law 16.
	Checked map[int]int
	// Compared counts, by what was compared, members of worlds with versions at rest.
	Compared map[string]int
	// SuspendedSeconds is the running time that is set aside, ExplainedSeconds that for which faults explain a loss.
	SuspendedSeconds, ExplainedSeconds int64
	// Suspensions counts pieces of running time in suspense, each of which faults must explain.
	Suspensions int
}

// Violation is a broken law.
type Violation struct {
	Seed uint64
	Law  int
	At   time.Time
	What string
	// Break is the rule that was left out, if any.
	Break Breakage
	// Trace ends with what broke it.
	Trace []string
}

// Error says what broke and how to see it again.
func (v *Violation) Error() string {
	replay := fmt.Sprintf("go test ./e2e/sim -run TestSimulation -seed %d", v.Seed)
	if v.Break != "" {
		replay += " -break " + string(v.Break)
	}
	return fmt.Sprintf("law %d: %s (at %s)\nseed %d; replay: %s\nthe last events:\n  %s",
		v.Law, v.What, v.At.Format(time.RFC3339Nano), v.Seed, replay, strings.Join(v.Trace, "\n  "))
}

// instant is true time, in microseconds since the world began. Nobody in the world can read it but the hub.
type instant int64

const (
	second instant = 1_000_000
	minute         = 60 * second
	hour           = 60 * minute
	day            = 24 * hour
)

func span(d time.Duration) instant   { return instant(d.Microseconds()) }
func (t instant) dur() time.Duration { return time.Duration(t) * time.Microsecond }
func (t instant) time() time.Time    { return genesis().Add(t.dur()) }
func since(t time.Time) instant      { return span(t.Sub(genesis())) }
func genesis() time.Time             { return time.Date(2031, 3, 1, 0, 0, 0, 0, time.UTC) }

// event is something that happens; node is -1 where it happens to no node's machine.
type event struct {
	at   instant
	seq  uint64
	node int
	kind string
	do   func()
}

// agenda is a binary heap of the events to come, the earliest first.
type agenda []event

func (e *event) before(o *event) bool { return e.at < o.at || e.at == o.at && e.seq < o.seq }

func (a *agenda) push(e event) {
	list := append(*a, e)
	i := len(list) - 1
	for i > 0 {
		parent := (i - 1) / 2
		if !e.before(&list[parent]) {
			break
		}
		list[i] = list[parent]
		i = parent
	}
	list[i] = e
	*a = list
}

func (a *agenda) pop() event {
	list := *a
	first, last := list[0], list[len(list)-1]
	list[len(list)-1] = event{}
	list = list[:len(list)-1]
	*a = list
	if len(list) == 0 {
		return first
	}
	i := 0
	for {
		child := 2*i + 1
		if child >= len(list) {
			break
		}
		if child+1 < len(list) && list[child+1].before(&list[child]) {
			child++
		}
		if !list[child].before(&last) {
			break
		}
		list[i] = list[child]
		i = child
	}
	list[i] = last
	return first
}

// World is everything.
type World struct {
	cfg    Config
	rng    *rand.Rand
	now    instant
	seq    uint64
	agenda agenda
	digest digest
	ring   [48]traced
	traces int
	broken *Violation

	hub *hub
	// peer is the hub as the nodes' sessions know it.
	peer   peer
	nodes  []*node
	oracle oracle
	// healing is set while no fault and no command may happen.
	healing bool
	// releases counts the versions of apps, qualities says what the world knows of their images.
	releases  int
	qualities map[string]quality
	result    Result
	// script stands for chance where a node runs beside the product's loop; nil in a world.
	script Script
}

type traced struct {
	at   instant
	kind string
	node int
	arg  int64
	text string
}

// Run simulates and returns the first broken law.
func Run(cfg Config) (Result, error) {
	w := newWorld(cfg)
	for len(w.agenda) > 0 && w.broken == nil {
		w.step()
	}
	w.result.Digest, w.result.Postings = uint64(w.digest), w.hub.rows.books.Postings
	if w.broken != nil {
		return w.result, w.broken
	}
	return w.result, nil
}

// step lets the next event happen.
func (w *World) step() {
	e := w.agenda.pop()
	w.now = e.at
	w.result.Events++
	w.trace(e.kind, e.node, 0, "")
	if e.node >= 0 {
		w.nodes[e.node].catchUp()
	}
	e.do()
}

func newWorld(cfg Config) *World {
	set := func(d *time.Duration, def time.Duration) {
		if *d == 0 {
			*d = def
		}
	}
	set(&cfg.Quiet, time.Hour)
	set(&cfg.Lease, 24*time.Hour)
	set(&cfg.Backup, 12*time.Hour)
	w := &World{
		cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x9e3779b97f4a7c15)), digest: newDigest,
		result:    Result{Faults: map[string]int{}, Checked: map[int]int{}, Compared: map[string]int{}},
		qualities: map[string]quality{},
	}
	w.oracle = newOracle(w)
	w.hub = newHub(w)
	w.peer = w.hub
	for i := range cfg.Nodes {
		w.nodes = append(w.nodes, newNode(w, i))
	}
	for _, n := range w.nodes {
		w.hub.rows.enroll(n)
		w.after(w.upTo(2*minute), n.i, "power", n.powerOn)
	}
	for org := range orgs {
		w.hub.reserve(org)
	}
	w.hub.planAccrual(0)
	w.planLife()
	return w
}

// after plans an event at the machine of a node, or at none's with -1.
func (w *World) after(d instant, node int, kind string, do func()) {
	w.seq++
	w.agenda.push(event{at: w.now + max(d, 0), seq: w.seq, node: node, kind: kind, do: do})
}

// digest is FNV-1a over words and bytes; two traces with the same digest are the same.
type digest uint64

const (
	newDigest   digest = 14695981039346656037
	digestPrime digest = 1099511628211
)

func (d *digest) number(n uint64) { *d = (*d ^ digest(n)) * digestPrime }

func (d *digest) text(s string) {
	for i := range len(s) {
		d.number(uint64(s[i]))
	}
}

// trace takes something into the digest. The text is for people only and only made when it is cheap.
func (w *World) trace(kind string, node int, arg int64, text string) {
	w.digest.number(uint64(w.now))
	w.digest.number(uint64(node))
	w.digest.number(uint64(arg))
	w.digest.text(kind)
	w.digest.text(text)
	w.ring[w.traces%len(w.ring)] = traced{w.now, kind, node, arg, text}
	w.traces++
}

// fail ends the world with a broken law.
func (w *World) fail(law int, format string, args ...any) {
	if w.broken != nil {
		return
	}
	v := &Violation{Seed: w.cfg.Seed, Break: w.cfg.Break, Law: law, At: w.now.time(), What: fmt.Sprintf(format, args...)}
	for i := max(0, w.traces-len(w.ring)); i < w.traces; i++ {
		t := w.ring[i%len(w.ring)]
		v.Trace = append(v.Trace, fmt.Sprintf("%s node %d %s %d %s", t.at.time().Format("01-02 15:04:05.000000"), t.node,
			t.kind, t.arg, t.text))
	}
	w.broken = v
}

func (w *World) breaks(b Breakage) bool { return w.cfg.Break == b }

// upTo is a random time below d, between one in [a, b), chance a coin that falls with probability p.
func (w *World) upTo(d instant) instant { return instant(w.rng.Int64N(int64(max(d, 1)))) }

func (w *World) between(a, b instant) instant { return a + w.upTo(b-a) }

func (w *World) chance(p float64) bool { return w.rng.Float64() < p }

// takes is how long something takes at a machine for a member or an image.
func (w *World) takes(kind, subject string, from, to instant) instant {
	if w.script != nil {
		return span(w.script.Takes(kind, subject))
	}
	return w.between(from, to)
}

// errChance is a failure that would not come again.
var errChance = errors.New("it failed by chance")

// fails is how an action ends that begins now and fails with probability p; nil is without failure.
func (w *World) fails(kind string, p float64) error {
	switch {
	case w.script != nil:
		return w.script.Fails(kind)
	case !w.healing && w.chance(p):
		return errChance
	}
	return nil
}
