package uplink

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

// pullInterval is how often the progress of pulls is sent at most, their ends apart.
const pullInterval = time.Second

// maxReportedPulls bounds one message.
const maxReportedPulls = 64

// reportPulls sends how far pulls are, as often as that changes.
func (s *session) reportPulls(ctx context.Context) error {
	tick := time.NewTicker(pullInterval)
	defer tick.Stop()
	for {
		if err := s.sendPulls(false); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// sendPulls sends how far pulls are, where the hub has not been told that or, with onlyEnds, that one has ended. A
// report sends the ends before it, so that the hub shows no pull of a member that runs.
func (s *session) sendPulls(onlyEnds bool) error {
	s.pullsMu.Lock()
	defer s.pullsMu.Unlock()
	pulls := s.observer.Pulls()
	pulls = pulls[:min(len(pulls), maxReportedPulls)]
	if onlyEnds && !hasEnded(s.pulls, pulls) ||
		slices.EqualFunc(pulls, s.pulls, func(a, b *protocol.ImagePull) bool { return proto.Equal(a, b) }) {
		return nil
	}
	s.pulls = pulls
	return s.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_PullProgress{
		PullProgress: &protocol.PullProgress{Pulls: pulls},
	}})
}

// hasEnded reports whether a pull of before has ended. The list may be as long as before: the next pull begins at once.
func hasEnded(before, now []*protocol.ImagePull) bool {
	return slices.ContainsFunc(before, func(b *protocol.ImagePull) bool {
		return !slices.ContainsFunc(now, func(n *protocol.ImagePull) bool { return n.GetMemberId() == b.GetMemberId() })
	})
}
