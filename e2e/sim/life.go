package sim

import (
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/lifecycle"
	"github.com/gpuaas/gpuaas/hub/plan"
)

// healFor is law 13's bound: two resync periods and a minute, and the second in which the machines come back.
const healFor = 2*resync + minute + second

// healFor is as long as that, and where versions of apps are changed long enough to leave one that never becomes ready.
func (w *World) healFor() instant {
	if w.cfg.Versions {
		return healFor + 3*minute
	}
	return healFor
}

// planLife schedules users, faults, backups, and now and then a world without faults in which all laws are checked.
func (w *World) planLife() {
	if w.cfg.Commands > 0 {
		w.again(instant(float64(day)/(w.cfg.Commands*float64(w.cfg.Nodes))), "command", w.command)
	}
	if w.cfg.Faults > 0 {
		w.again(instant(float64(day)/(w.cfg.Faults*float64(w.cfg.Nodes))), "fault", w.fault)
		// All nodes dial again after each, which is what a large world spends its time on.
		w.again(day/2*instant(1+w.cfg.Nodes/250), "hub fault", w.hubFault)
	}
	if w.cfg.Versions {
		w.again(day/instant(w.cfg.Nodes), "owner", w.changeRules)
	}
	w.planHeals()
	w.planBackups()
	w.after(w.end(), -1, "end", func() { w.agenda = nil })
}

func (w *World) planHeals() {
	days := instant(w.cfg.Days) * day
	heals := max(1, w.cfg.Days/3)
	for k := 1; k <= heals; k++ {
		w.plan(days/instant(heals)*instant(k)-w.healFor()-minute, "heal", k, w.heal)
	}
}

func (w *World) planBackups() {
	days, every, draws := instant(w.cfg.Days)*day, span(w.cfg.Backup), w.draws("restore")
	restores := map[int]bool{}
	for range w.cfg.Restores {
		restores[1+draws.IntN(int(max(days/every-1, 1)))] = true
	}
	for k := 1; every*instant(k) < days-every; k++ {
		at, keep := every*instant(k), restores[k]
		w.plan(at, "backup", k, func() { w.hub.takeBackup(keep) })
		if keep {
			w.plan(at+instant(draws.Int64N(int64(every))), "restore", k, func() {
				if w.healing || w.hub.backup == nil {
					return
				}
				w.result.Faults["hub restored"]++
				w.hub.restore()
			})
		}
	}
}

// heal ends every fault, waits until the world is at rest, and checks the laws.
func (w *World) heal() {
	w.healing = true
	w.hub.start()
	for _, n := range w.nodes {
		n.up.cutUp, n.up.cutDown, n.rtcDead = false, false, false
		w.after(w.upTo(second), n.i, "healed", func() {
			n.powerOn()
			n.startAgent()
			n.up.smooth()
			n.up.resumeDial()
			n.activate()
		})
	}
	w.after(w.healFor(), -1, "check", func() {
		w.oracle.check()
		w.healing = false
	})
}

// command is something that a user asks for.
func (w *World) command() {
	if !w.hub.up {
		return
	}
	live := w.liveMember()
	if w.cfg.Versions {
		w.versionCommand(live)
		return
	}
	switch dice := w.rng.IntN(10); {
	case live == nil || dice < 4:
		w.create()
	case dice < 7:
		_ = w.hub.decommission(live) // it may have begun already
		w.oracle.members[live.id].wanted = false
		if w.breaks(BreakProof) {
			w.hub.rows.nodes[live.node].free(live)
			live.accelerators = nil
		}
		w.hub.touch(live.node)
		if w.chance(0.5) {
			// Something else in its place, as soon as there is room.
			w.after(w.upTo(30*second), -1, "instead", func() {
				if w.hub.up && !w.healing {
					w.createOn([]int{live.node}, max(1, len(w.hub.rows.nodes[live.node].accelerators)))
				}
			})
		}
	case dice < 9:
		if next, _, err := lifecycle.Upgrade(live.life, live.history()); err == nil {
			live.life = next
			live.revision++
			live.services = servicesOf(live, len(live.services))
			w.oracle.members[live.id].stopped, w.oracle.members[live.id].revision = false, live.revision
			w.hub.touch(live.node)
		}
	default:
		act := w.hub.stop
		if live.stopped() {
			act = w.hub.restart
		}
		if act(live) == nil {
			w.oracle.members[live.id].stopped, w.oracle.members[live.id].revision = live.stopped(), live.revision
			w.hub.touch(live.node)
		}
	}
}

// liveMember is a random member that a user can act on; nil where there is none.
func (w *World) liveMember() *memberRow {
	for range 8 {
		row := &w.hub.rows.nodes[w.rng.IntN(len(w.nodes))]
		if len(row.members) == 0 || row.awaitsResync {
			continue
		}
		if m := row.members[w.rng.IntN(len(row.members))]; m.Desired && !m.Gone && w.oracle.members[m.id].wanted {
			return m
		}
	}
	return nil
}

func (w *World) create() {
	var candidates []int
	for range 6 {
		candidates = append(candidates, w.rng.IntN(len(w.nodes)))
	}
	w.createOn(unique(candidates), w.rng.IntN(3))
}

func (w *World) createOn(candidates []int, accelerators int) {
	need := plan.Need{
		CPUMillis: int64(500 * (1 + w.rng.IntN(6))), MemoryBytes: int64(1+w.rng.IntN(8)) << 30,
		Accelerators: accelerators,
	}
	crashChance := 0.0
	if w.chance(0.25) {
		crashChance = w.rng.Float64()
	}
	services := 1
	if w.chance(0.2) {
		services = 2
	}
	org := w.rng.IntN(orgs)
	if w.cfg.Shared > 0 && w.chance(w.cfg.Shared) {
		org, need = 1+w.rng.IntN(sharingOrgs), w.sliceOf(need)
	}
	var m *memberRow
	if w.cfg.Versions {
		m = w.createVersion(candidates, accelerators, w.drawQuality())
	} else {
		m = w.hub.create(candidates, org, need, services)
	}
	if m != nil {
		w.oracle.asked(m, crashChance)
	}
}

func unique(in []int) []int {
	var out []int
	seen := map[int]bool{}
	for _, i := range in {
		if !seen[i] {
			out = append(out, i)
		}
		seen[i] = true
	}
	return out
}

// long is a time whose size is anywhere between a second and most.
func (w *World) long(most instant) instant {
	d := second
	for d < most && w.chance(0.8) {
		d *= 3
	}
	return w.upTo(min(d, most)) + second
}

// fault is something that goes wrong at one node.
func (w *World) fault() {
	n := w.nodes[w.rng.IntN(len(w.nodes))]
	kinds := []struct {
		name string
		do   func(*node)
	}{
		{"network cut", w.cut},
		{"network rough", w.roughen},
		{"agent killed", w.killAgent},
		{"power cut", w.cutPower},
		{"old state replayed", w.replayState},
		{"clock set", w.setClock},
		{"shim killed", w.killShim},
		{"disk put back", w.putDiskBack},
		{"writes lost", w.loseWrites},
	}
	kind := kinds[w.rng.IntN(len(kinds))]
	if len(w.cfg.Kinds) > 0 && !slices.Contains(w.cfg.Kinds, kind.name) {
		return
	}
	w.result.Faults[kind.name]++
	// At the node, so that catchUp samples its usage first.
	draws := w.rng
	w.after(0, n.i, kind.name, func() { w.drawing(draws, func() { kind.do(n) }) })
}

func (w *World) cut(n *node) {
	up, down := true, true
	switch w.rng.IntN(4) {
	case 0:
		up = false
	case 1:
		down = false
	}
	w.cutFor(n, up, down, w.long(3*day))
}

func (w *World) cutFor(n *node, up, down bool, length instant) {
	if n.up.cutUp || n.up.cutDown {
		return
	}
	n.up.cutUp, n.up.cutDown = up, down
	if n.agentUp {
		n.up.lose()
	}
	w.after(length, n.i, "network back", func() {
		n.up.cutUp, n.up.cutDown = false, false
		if n.agentUp {
			n.up.resumeDial()
		}
	})
}

func (w *World) roughen(n *node) {
	n.up.rough = true
	w.after(w.between(minute, 2*hour), n.i, "network smooth", n.up.smooth)
}

func (w *World) killAgent(n *node) {
	n.killAgent()
	w.after(w.long(day), n.i, "agent back", n.startAgent)
}

func (w *World) cutPower(n *node) {
	if !n.powered {
		return
	}
	n.powerOff()
	if w.chance(0.3) {
		w.cutFor(n, true, true, w.long(day))
	}
	if w.chance(0.15) {
		n.rtcDead = true
	}
	w.after(w.long(12*hour), n.i, "power", func() {
		n.powerOn()
		life := n.life
		w.after(5*minute, n.i, "cold boot", func() {
			if n.life == life && n.agentUp && n.up.no == 0 {
				w.oracle.coldBoot(n)
			}
		})
	})
}

// replayState delivers the present state again, up to a day later.
func (w *World) replayState(n *node) { w.deliverLate(n, w.hub.rows.nodes[n.i].head, w.long(day)) }

// deliverLate delivers a signed state after a while, whichever hub the node has met by then.
func (w *World) deliverLate(n *node, s head, after instant) {
	if s.envelope == nil {
		return
	}
	w.after(after, n.i, "replay", func() {
		if n.agentUp && !w.healing {
			n.up.pushedState(n.up.attempt, s.envelope, s.parts)
		}
	})
}

// setClock sets the machine's own clock, by seconds or by a day.
func (w *World) setClock(n *node) {
	by := time.Duration(w.rng.Int64N(int64(48*time.Hour))) - 24*time.Hour
	if w.chance(0.5) {
		by /= 10_000
	}
	n.rtcOffset = by
	n.rtcDead = false
	if !n.agentUp {
		n.clockWrong()
	}
	n.wake()
}

func (w *World) killShim(n *node) {
	for _, c := range n.containers {
		n.end(c, false, 137)
		break
	}
	n.wake()
}

// putDiskBack restores an image of the disk days later, sometimes while the hub is away.
func (w *World) putDiskBack(n *node) {
	image, at := n.store.clone(), w.now
	w.after(w.long(2*day), n.i, "disk put back", func() {
		if w.healing {
			return
		}
		w.restoreDisk(n, image, at)
	})
}

// loseWrites is a power cut that takes the last seconds of the disk with it: it lied about what was synced.
func (w *World) loseWrites(n *node) {
	image, at := n.store.clone(), w.now
	w.after(w.upTo(30*second), n.i, "writes lost", func() {
		if w.healing {
			return
		}
		if n.powered {
			n.powerOff()
		}
		w.restoreDisk(n, image, at)
		w.after(w.long(hour), n.i, "power", n.powerOn)
	})
}

func (w *World) restoreDisk(n *node, image *disk, at instant) {
	n.killAgent()
	n.store = image.clone()
	n.diskRestored = true
	n.sealsAgain()
	n.doubt.begin(at, &n.doubt.state, &n.doubt.leases)
	if w.chance(0.4) {
		w.cutFor(n, true, true, w.long(day))
	}
	w.after(w.long(minute), n.i, "agent back", n.startAgent)
}

// hubFault kills the hub for a while.
func (w *World) hubFault() {
	w.result.Faults["hub killed"]++
	w.hub.crash()
	w.after(w.long(12*hour), -1, "hub back", w.hub.start)
}
