package uplink

import (
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

// pullInterval is how often the progress of pulls is sent at most.
const pullInterval = time.Second

// maxReportedPulls bounds one message.
const maxReportedPulls = 64

// reportPulls sends how far pulls are, as often as that changes.
func (s *session) reportPulls(ctx context.Context) error {
	tick := time.NewTicker(pullInterval)
	defer tick.Stop()
	var sent []*protocol.ImagePull
	for {
		pulls := s.observer.Pulls()
		pulls = pulls[:min(len(pulls), maxReportedPulls)]
		if !slices.EqualFunc(pulls, sent, func(a, b *protocol.ImagePull) bool { return proto.Equal(a, b) }) {
			if err := s.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_PullProgress{
				PullProgress: &protocol.PullProgress{Pulls: pulls},
			}}); err != nil {
				return err
			}
			sent = pulls
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}
