package heard_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/heard"
)

func TestLaw02StoreBehindTheHubsRecordIsNoticed(t *testing.T) {
	last := heard.Store{Incarnation: "i1", Epoch: 2, Generation: 7}
	for name, c := range map[string]struct {
		said                heard.Store
		lastSegment, posted uint64
		behind              bool
	}{
		"the very store":                {last, 5, 5, false},
		"one that went on":              {heard.Store{Incarnation: "i1", Epoch: 2, Generation: 8}, 9, 5, false},
		"a lower generation":            {heard.Store{Incarnation: "i1", Epoch: 2, Generation: 6}, 5, 5, true},
		"a lower epoch":                 {heard.Store{Incarnation: "i1", Epoch: 1, Generation: 9}, 5, 5, true},
		"fewer segments":                {last, 4, 5, true},
		"a new store":                   {heard.Store{Incarnation: "i2"}, 0, 0, false},
		"a store heard before":          {heard.Store{Incarnation: "i0", Epoch: 1}, 3, 4, true},
		"one that was heard twice":      {heard.Store{Incarnation: "i3", Epoch: 2, Generation: 7}, 5, 5, true},
		"a store without a name":        {heard.Store{}, 0, 0, false},
		"one that a hub was set behind": {heard.Store{Incarnation: "i1", Epoch: 3, Generation: 1}, 5, 5, false},
	} {
		require.Equal(t, c.behind, heard.Behind(c.said, last, c.lastSegment, c.posted, []string{"i3"}), name)
	}
}

// process is an agent's process as NotAlone knows it: what it holds in memory, and nothing on disk.
type process struct{ lastSession uint64 }

// hub is what the hub keeps for NotAlone: the newest session, what its hello named, and the newest in which it took a
// report.
type hub struct{ session, named, reported uint64 }

func (h *hub) hello(p *process) uint64 {
	h.session++
	h.named = p.lastSession
	return h.session
}

func (h *hub) report(session uint64) (notAlone bool) {
	if session != h.session {
		return false
	}
	notAlone = h.reported != session && heard.NotAlone(h.named, h.reported)
	h.reported = session
	return notAlone
}

// One process after the other: whatever restarts, is lost on the way or comes late, nobody is taken for a second
// machine.
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

// Two processes that live at the same time are noticed as soon as the first speaks again, whoever copied whom and when.
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

func TestLaw13SilenceProvesWhatItCan(t *testing.T) {
	never := heard.Absence{Epoch: 1, Generation: 5}
	spoken := heard.Absence{Epoch: 1, Generation: 5, Spoken: true, SpokenIn: "i1"}
	for name, c := range map[string]struct {
		absence           heard.Absence
		epoch, generation uint64
		incarnation       string
		proven            bool
	}{
		"never spoken of":                        {never, 1, 5, "i1", true},
		"never spoken of, a later epoch":         {never, 2, 1, "i1", true},
		"never spoken of, but it may still come": {never, 1, 4, "i1", false},
		"not asked to go yet":                    {heard.Absence{}, 1, 9, "i1", false},
		"silent in the incarnation that spoke":   {spoken, 1, 9, "i1", false},
		"silent in another incarnation":          {spoken, 1, 5, "i2", true},
		"silent in another, with an older state": {spoken, 1, 4, "i2", false},
		"silent, and nobody knows who spoke": {
			heard.Absence{Epoch: 1, Generation: 5, Spoken: true},
			1, 5, "i2",
			false,
		},
		"silent, and the node does not say who it is": {spoken, 1, 5, "", false},
	} {
		require.Equal(t, c.proven, c.absence.Proven(c.epoch, c.generation, c.incarnation), name)
	}
}
