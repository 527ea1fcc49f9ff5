package nodeidentity_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/nodeidentity"
)

func TestLaw02StoreBehindTheHubsRecordIsNoticed(t *testing.T) {
	last := nodeidentity.Store{Incarnation: "i1", Epoch: 2, Generation: 7}
	for name, c := range map[string]struct {
		hello               nodeidentity.Store
		lastSegment, posted uint64
		behind              bool
	}{
		"the very store":                {last, 5, 5, false},
		"one that went on":              {nodeidentity.Store{Incarnation: "i1", Epoch: 2, Generation: 8}, 9, 5, false},
		"a lower generation":            {nodeidentity.Store{Incarnation: "i1", Epoch: 2, Generation: 6}, 5, 5, true},
		"a lower epoch":                 {nodeidentity.Store{Incarnation: "i1", Epoch: 1, Generation: 9}, 5, 5, true},
		"fewer segments":                {last, 4, 5, true},
		"a new store":                   {nodeidentity.Store{Incarnation: "i2"}, 0, 0, false},
		"a store seen before":           {nodeidentity.Store{Incarnation: "i0", Epoch: 1}, 3, 4, true},
		"a suspect incarnation":         {nodeidentity.Store{Incarnation: "i3", Epoch: 2, Generation: 7}, 5, 5, true},
		"a store without a name":        {nodeidentity.Store{}, 0, 0, false},
		"one that a hub was set behind": {nodeidentity.Store{Incarnation: "i1", Epoch: 3, Generation: 1}, 5, 5, false},
	} {
		require.Equal(t, c.behind, nodeidentity.StoreBehind(c.hello, last, c.lastSegment, c.posted, []string{"i3"}), name)
	}
}

// process is an agent's process as CloneDetected knows it: what it holds in memory, and nothing on disk.
type process struct{ lastSession uint64 }

// hub is what the hub keeps for CloneDetected: the newest session, what its hello named, and the newest in which it
// took a report.
type hub struct{ session, named, reported uint64 }

func (h *hub) hello(p *process) uint64 {
	h.session++
	h.named = p.lastSession
	return h.session
}

func (h *hub) report(session uint64) (cloned bool) {
	if session != h.session {
		return false
	}
	cloned = h.reported != session && nodeidentity.CloneDetected(h.named, h.reported)
	h.reported = session
	return cloned
}

// Processes that follow each other, with restarts and with lost or late messages, never count as a second machine.
func TestProcessesThatFollowEachOtherAreOneMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h, p := &hub{}, &process{}
		late := []uint64{}
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			switch rapid.SampledFrom([]string{"session", "welcome lost", "hello late", "restart"}).Draw(t, "step") {
			case "session":
				p.lastSession = h.hello(p)
				for range rapid.IntRange(0, 2).Draw(t, "reports") {
					require.False(t, h.report(p.lastSession))
				}
				late = append(late, p.lastSession)
			case "welcome lost":
				h.hello(p)
			case "hello late":
				// Of a connection that has gone: no report follows, but one of an older session may.
				h.hello(&process{lastSession: rapid.Uint64Range(0, h.session).Draw(t, "named")})
				if len(late) > 0 {
					require.False(t, h.report(rapid.SampledFrom(late).Draw(t, "late report")))
				}
			case "restart":
				*p = process{}
			}
		}
	})
}

// Two processes that live at the same time are detected as soon as the first reports again.
func TestTwoProcessesAtTheSameTimeAreNoticed(t *testing.T) {
	for name, second := range map[string]func(*process) *process{
		"a copy of the disk":    func(*process) *process { return &process{} },
		"a copy of the machine": func(p *process) *process { c := *p; return &c },
		"a liar":                func(*process) *process { return &process{lastSession: 1 << 40} },
	} {
		h, first := &hub{}, &process{}
		first.lastSession = h.hello(first)
		require.False(t, h.report(first.lastSession), name)
		other := second(first)
		other.lastSession = h.hello(other)
		require.False(t, h.report(other.lastSession), name)
		first.lastSession = h.hello(first)
		require.True(t, h.report(first.lastSession), name)
	}
}
