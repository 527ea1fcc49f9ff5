package sim

import (
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/e2e/sim/nodestore"
	"github.com/gpuaas/gpuaas/protocol"
)

// Script says what is left to chance in a world.
type Script interface {
	// Takes is how long something takes at the machine for a member or an image, in whole microseconds.
	Takes(kind, subject string) time.Duration
	// Fails is how an action ends that begins now; nil is without failure.
	Fails(kind string) error
	// HubAway says that there is no session.
	HubAway() bool
	// Part is a document that the hub has.
	Part(sum [32]byte) ([]byte, error)
}

// Node is one node of the simulation without a world: agent/internal/reconcile's tests run it beside the product's
// loop.
type Node struct{ n *node }

// NewNode returns a node whose machine is off.
func NewNode(id string, s Script) *Node {
	w := &World{rng: rand.New(rand.NewPCG(1, 1)), digest: newDigest, script: s}
	w.oracle = newOracle(w)
	n := newNode(w, 0)
	w.nodes, n.id = []*node{n}, id
	n.store = &disk{Store: nodestore.New(n.id, "")}
	n.up.cutUp = true
	return &Node{n}
}

// SetIncarnation names the store's life.
func (x *Node) SetIncarnation(name string) { x.n.store.Chain.Incarnation = name }

// Time is the true time.
func (x *Node) Time() time.Time { return x.n.w.now.time() }

// Advance lets everything happen that is due until then, and every sample.
func (x *Node) Advance(to time.Time) {
	n, w, end := x.n, x.n.w, since(to)
	for {
		due := n.lastSample - (n.lastSample-n.phase)%sampling + sampling
		samples := n.agentUp && due <= end
		switch {
		case len(w.agenda) > 0 && w.agenda[0].at <= end && (!samples || w.agenda[0].at <= due):
			w.step()
		case samples:
			w.now = due
			n.catchUp()
		default:
			w.now = end
			return
		}
	}
}

// PowerOn boots the machine and starts the agent.
func (x *Node) PowerOn() { x.n.powerOn() }

// PowerOff ends everything at once.
func (x *Node) PowerOff() { x.n.powerOff() }

// StartAgent starts the agent's process.
func (x *Node) StartAgent() { x.n.startAgent() }

// KillAgent ends the agent's process; containers run on.
func (x *Node) KillAgent() { x.n.killAgent() }

// AcceptState accepts a desired state.
func (x *Node) AcceptState(v protocol.Verified[*protocol.DesiredState], parts [][]byte) error {
	for _, ref := range v.Message().GetParts() {
		x.n.w.oracle.members[ref.GetId()] = &memberFacts{id: ref.GetId()}
	}
	err := x.n.store.AcceptState(v, parts)
	x.n.wake()
	return err
}

// AcceptLeases accepts a batch of leases.
func (x *Node) AcceptLeases(batch *protocol.LeaseBatch) error {
	err := x.n.store.AcceptLeases(batch)
	x.n.wake()
	return err
}

// SyncClock takes over the hub's time.
func (x *Node) SyncClock(hub time.Time, took time.Duration) {
	x.n.syncClock(hub, span(took))
	x.n.wake()
}

// SetRTC sets the machine's own clock, by how much it is ahead of the true time.
func (x *Node) SetRTC(ahead time.Duration) { x.n.rtcOffset = ahead }

// Wake runs a pass.
func (x *Node) Wake() { x.n.wake() }

// Exit ends a container's process; where nobody sees that, it has neither code nor time.
func (x *Node) Exit(containerID string, seen bool, code int32) {
	if c := x.n.containerOf(containerID); c != nil {
		x.n.end(c, seen, code)
	}
}

// Store is the node's store.
func (x *Node) Store() *nodestore.Store { return x.n.store.Store }

// Containers are those on the machine, by id.
func (x *Node) Containers() []agent.Listed {
	out := x.n.listed()
	slices.SortFunc(out, func(a, b agent.Listed) int { return strings.Compare(a.ID, b.ID) })
	return out
}

// Networks are the attachments of services, as member@service.
func (x *Node) Networks() []string {
	var names []string
	for _, a := range x.n.attachments() {
		names = append(names, a.memberID+"@"+a.service)
	}
	return names
}

// Busy are the members with running actions, and with which.
func (x *Node) Busy() map[string]agent.Work {
	busy := map[string]agent.Work{}
	for id := range x.n.busy {
		busy[id] = x.n.busyWith(id)
	}
	return busy
}

// Report is what the last pass reported.
func (x *Node) Report() []*protocol.WorkloadStatus { return x.n.report }

// Broken is the first law that the node broke.
func (x *Node) Broken() error {
	if x.n.w.broken != nil {
		return x.n.w.broken
	}
	return nil
}
