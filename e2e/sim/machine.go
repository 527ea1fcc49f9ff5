package sim

import (
	"crypto/ed25519"
	"crypto/sha256"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/e2e/sim/nodestore"
	"github.com/gpuaas/gpuaas/protocol"
)

// container is one on a machine: as its runtime lists it, and what only the world knows of it.
type container struct {
	agent.Listed
	cpuMillis, memoryBytes int64
	// upAt, endedAt and readyAt are true times.
	upAt, endedAt, readyAt instant
	org                    string
	image                  string
	// began is when its start began.
	began instant
}

func (c *container) cpuMicros(t instant) int64 {
	if c.Status != agent.Running {
		t = c.endedAt
	}
	return int64(t-c.upAt) * c.cpuMillis / 2000
}

// node is one machine with its agent.
type node struct {
	w    *World
	i    int
	id   string
	key  ed25519.PrivateKey
	self protocol.NodeIdentity
	// accelerators that the machine has; gpus has the shared GPU of each that is a slice.
	accelerators []string
	gpus         map[string]string

	powered   bool
	bootID    int
	bootedAt  instant
	rtcOffset time.Duration
	// rtcDead is a machine that comes up in 1970.
	rtcDead    bool
	containers []*container
	// creating are containers that the runtime is making.
	creating []*container
	networks map[attachment]bool
	images   map[string]bool
	// runs counts the runs of each member, for their ids.
	runs map[string]int
	// lives counts lives of the disk, for names.
	lives int

	store *disk

	agentUp bool
	// life is of the agent's process: what a dead one began does not end.
	life  int
	clock clock.Clock
	times machineTime
	// busy are the running actions of each member; hold is until when a service or a member waits after one that
	// failed.
	busy       map[string][]*task
	hold       map[heldWork]time.Time
	lastSample instant
	// watchedSince is when the agent began to probe, by its clock.
	watchedSince time.Time
	// phase is the agent's start: samples are due at whole intervals after it.
	phase   instant
	report  []*protocol.WorkloadStatus
	waking  bool
	tickNo  int
	alarmNo int
	// activeUntil is until when the node runs a pass at every resync.
	activeUntil instant

	up uplink
	// diskRestored is set until the node has accepted a state: the oracle allows any stop.
	diskRestored bool
	// clockFaulty: the node's clock was wrong since its last sync.
	clockFaulty bool
	// refusedOld counts states of lost hubs that the node has refused.
	refusedOld int
	doubt      doubt
	admissions admissions
	setAside
}

// disk is a node's store with what the oracle knows of it: the highest state that this lineage has applied.
type disk struct {
	*nodestore.Store
	highest appliedState
}

type appliedState struct {
	epoch, generation uint64
	digest            [sha256.Size]byte
	// restores is how often the hub had been restored when it signed the state.
	restores int
}

func (d *disk) clone() *disk { return &disk{d.Clone(), d.highest} }

const (
	resync   = instant(agent.DefaultResync / time.Microsecond)
	sampling = instant(agent.DefaultMeteringInterval / time.Microsecond)
	// activeFor is how long a node runs a pass at every resync after something happened there.
	activeFor = 5 * minute
)

func newNode(w *World, i int) *node {
	seed := sha256.Sum256(fmt.Appendf(nil, "node %d of %d", i, w.cfg.Seed))
	n := &node{
		w: w, i: i, id: fmt.Sprintf("node-%05d", i), key: ed25519.NewKeyFromSeed(seed[:]),
		images: map[string]bool{}, networks: map[attachment]bool{}, runs: map[string]int{}, gpus: map[string]string{},
	}
	public, _ := n.key.Public().(ed25519.PublicKey)
	n.self = protocol.NewNodeIdentity(n.id, public)
	for a := range []int{0, 1, 2, 4}[w.rng.IntN(4)] {
		n.install(fmt.Sprintf("gpu-%05d-%d", i, a))
	}
	n.store = &disk{Store: nodestore.New(n.id, n.newName())}
	n.store.AnyOrder = w.breaks(BreakOrder)
	return n
}

func (n *node) newName() string {
	n.lives++
	return fmt.Sprintf("%s-life-%d", n.id, n.lives)
}

// powerOn boots the machine and starts the agent.
func (n *node) powerOn() {
	if n.powered {
		return
	}
	n.powered, n.bootID, n.bootedAt = true, n.bootID+1, n.w.now
	n.startAgent()
}

// powerOff ends everything at once. What was running has no exit time that anyone saw.
func (n *node) powerOff() {
	n.killAgent()
	n.powered = false
	for _, c := range n.containers {
		n.end(c, false, 137)
	}
	// The network lives under /run.
	clear(n.networks)
}

func (n *node) startAgent() {
	if !n.powered || n.agentUp {
		return
	}
	n.agentUp = true
	n.store.Reopen()
	n.startClock()
	n.watchedSince = n.now()
	n.life++
	n.busy, n.hold, n.report = map[string][]*task{}, map[heldWork]time.Time{}, nil
	n.phase = n.w.now
	n.attended()
	n.sample(n.w.now)
	n.activate()
	n.up.start(n)
}

// killAgent ends the process; containers run on. What it had begun is left where it was.
func (n *node) killAgent() {
	if !n.agentUp {
		return
	}
	n.agentUp, n.creating = false, nil
	n.life++
	n.up.drop()
}

// start makes a container's process.
func (n *node) start(c *container) {
	for _, other := range n.containers {
		if other == c || other.Status != agent.Running {
			continue
		}
		if n.beside(c, []*container{other}) != nil {
			n.w.fail(14, "%s of org %s runs beside %s of org %s on one GPU", c.MemberID, c.org, other.MemberID, other.org)
		}
		// Of a service that starts first, the next copy stands beside the one that serves.
		sameCopy := c.Copy == "" || c.Copy == other.Copy
		if other.MemberID == c.MemberID && other.Service == c.Service && sameCopy {
			n.w.fail(14, "member %s runs twice on node %s", c.MemberID, n.id)
		}
		for _, id := range c.AcceleratorIDs {
			if slices.Contains(other.AcceleratorIDs, id) {
				n.w.fail(14, "accelerator %s is used by %s and %s", id, c.MemberID, other.MemberID)
			}
		}
	}
	c.Status, c.upAt, c.StartedAt = agent.Running, n.w.now, n.rtc(n.w.now)
	n.w.result.Starts++
	n.w.oracle.started(c)
	n.w.oracle.startedVersion(n, c)
	crashChance := n.w.oracle.crashChanceOf(c.MemberID)
	c.readyAt = n.w.now + n.w.takes("ready", c.MemberID, second/2, 8*second)
	n.w.after(c.readyAt-n.w.now, n.i, "ready", n.wake)
	if n.w.qualities[c.image] == unready {
		c.readyAt = math.MaxInt64
	}
	if crashChance > 0 && !n.w.healing && n.w.chance(crashChance) {
		n.w.after(n.w.between(second, 20*hour), n.i, "exit", func() {
			if !n.w.healing && c.Status == agent.Running {
				n.end(c, true, 1)
			}
		})
	}
}

// end is the end of a container's process. One that nobody saw has neither time nor code.
func (n *node) end(c *container, seen bool, code int32) {
	was := c.Status
	if was == agent.Exited || was == agent.Created && n.powered {
		return
	}
	c.Status, c.endedAt, c.Lost = agent.Exited, n.w.now, !seen
	if was == agent.Created {
		return
	}
	if seen {
		c.ExitedAt, c.ExitCode = n.rtc(n.w.now), code
	}
	n.w.oracle.ended(n, c, seen)
	n.wake()
}

func (n *node) containerOf(id string) *container {
	if i := slices.IndexFunc(n.containers, func(c *container) bool { return c.ID == id }); i >= 0 {
		return n.containers[i]
	}
	return nil
}

func (n *node) remove(id string) {
	if c := n.containerOf(id); c != nil {
		n.end(c, true, 137)
		n.containers = slices.DeleteFunc(n.containers, func(x *container) bool { return x == c })
		n.wake()
	}
}
