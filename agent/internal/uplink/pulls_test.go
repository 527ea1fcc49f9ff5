package uplink_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestPullsAreSentWhenTheyGoOnAndAtMostOnceASecond(t *testing.T) {
	_, n, s := start(t)
	next := func() (p *protocol.PullProgress) {
		s.until(func(m *protocol.NodeMessage) bool { p = m.GetPullProgress(); return p != nil })
		return p
	}
	pull := func(done uint64) []*protocol.ImagePull {
		return []*protocol.ImagePull{{
			MemberId: "m1", Phase: protocol.ImagePull_FETCHING, DoneBytes: done, TotalBytes: 1 << 40,
		}}
	}
	stop, began := make(chan struct{}), time.Now()
	go func() {
		for done := uint64(1); ; done++ {
			n.seen.setPulls(pull(done))
			select {
			case <-stop:
				n.seen.setPulls(nil)
				close(stop)
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	first := next()
	require.Equal(t, "m1", first.GetPulls()[0].GetMemberId())
	for range 2 {
		later := next()
		require.Greater(t, later.GetPulls()[0].GetDoneBytes(), first.GetPulls()[0].GetDoneBytes())
	}
	require.Greater(t, time.Since(began), time.Second)
	stop <- struct{}{}
	<-stop
	for len(next().GetPulls()) > 0 {
	}
}

// The slot of a pull that has ended is taken at once.
func TestAPullThatHasEndedAsAnotherBeganIsSaidBeforeTheReportThatFollows(t *testing.T) {
	_, n, s := start(t)
	waits := func(m *protocol.NodeMessage, memberID string) bool {
		pulls := m.GetPullProgress().GetPulls()
		return len(pulls) == 1 && pulls[0].GetMemberId() == memberID
	}
	for round := range uint64(5) {
		n.seen.setPulls([]*protocol.ImagePull{{MemberId: "m1"}})
		s.until(func(m *protocol.NodeMessage) bool { return waits(m, "m1") })
		n.seen.setPulls([]*protocol.ImagePull{{MemberId: "m2"}})
		n.seen.set(agent.Report{Generation: round + 1})
		said := false
		s.until(func(m *protocol.NodeMessage) bool {
			said = said || waits(m, "m2")
			return m.GetReport().GetGeneration() == round+1
		})
		require.True(t, said)
	}
}

func TestAPullThatHasEndedIsSaidBeforeTheReportThatFollows(t *testing.T) {
	_, n, s := start(t)
	for round := range uint64(5) {
		n.seen.setPulls([]*protocol.ImagePull{{MemberId: "m1", DoneBytes: round + 1}})
		s.until(func(m *protocol.NodeMessage) bool { return m.GetPullProgress().GetPulls() != nil })
		n.seen.setPulls(nil)
		n.seen.set(agent.Report{Generation: round + 1})
		said := false
		s.until(func(m *protocol.NodeMessage) bool {
			said = said || m.GetPullProgress() != nil && m.GetPullProgress().GetPulls() == nil
			return m.GetReport().GetGeneration() == round+1
		})
		require.True(t, said)
	}
}
