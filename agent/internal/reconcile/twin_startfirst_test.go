package reconcile_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/protocol"
)

// TestTheSimulationStartsFirstAsTheNode upgrades a member again and again while the agent is killed and containers exit
// at random, and compares both as TestTheSimulationExecutesAsTheNode does.
func TestTheSimulationStartsFirstAsTheNode(t *testing.T) {
	eachTwin(t, 40, func(w *twin) {
		w.beside = true
		w.script.change(func(s *script) {
			s.takes["ready"] = time.Second + w.upTo(5*time.Second)
			s.takes["pull"] = w.upTo(5 * time.Second)
		})
		for range 8 {
			w.upgrade()
		}
		w.pass(time.Minute) // of two containers that end at once, either may be recorded first
	}, "ports moved", "confirmed", "killed at work", "restarted", "removed")
}

// upgrade accepts the next revision, with the one before as its fallback, and lets some time pass.
func (w *twin) upgrade() {
	synctest.Wait()
	w.node.Advance(w.now())
	w.current["a"] = w.workload("a", w.current["a"])
	v, parts := w.hub.desired([]*protocol.Workload{w.current["a"]}...)
	w.note("accepts revision %d", w.current["a"].GetRevision())
	require.NoError(w.t, w.store.AcceptState(v, parts))
	require.NoError(w.t, w.node.AcceptState(v, parts))
	w.pass(0)
	leases := w.hub.leases(w.store.Incarnation(), w.hub.newLease("a", time.Hour))
	require.NoError(w.t, w.store.AcceptLeases(leases))
	require.NoError(w.t, w.node.AcceptLeases(leases.Message()))
	for range 4 {
		w.pass(w.upTo(8 * time.Second))
		w.compare()
		switch w.rng.IntN(6) {
		case 0, 1:
			w.note("agent killed")
			w.killBoth()
			w.pass(w.upTo(2 * time.Second))
			w.startAgent()
			w.node.StartAgent()
		case 2:
			w.exit()
		}
	}
}
