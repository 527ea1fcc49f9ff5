package nodelink

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxPulls bounds the pulls that are kept of one node.
	maxPulls = 64
	// pullPhaseBurst and pullPhaseEvery bound the phases of pulls that one session hands on; more are only shown.
	pullPhaseBurst = 3 * maxPulls
	pullPhaseEvery = 10 * time.Second
)

// pulls are the pulls under way on a node. The mutex of the connection guards them.
type pulls struct {
	byMember map[string]*protocol.ImagePull
	phases   *rate.Limiter
}

// replace stores what the node says now, and returns the pulls that have entered a phase since.
func (p *pulls) replace(m *protocol.PullProgress) (entered []*protocol.ImagePull) {
	if p.phases == nil {
		p.phases = rate.NewLimiter(rate.Every(pullPhaseEvery), pullPhaseBurst)
	}
	now := map[string]*protocol.ImagePull{}
	for _, one := range m.GetPulls()[:min(len(m.GetPulls()), maxPulls)] {
		before := p.byMember[one.GetMemberId()]
		if (before == nil || before.GetPhase() != one.GetPhase()) && p.phases.Allow() {
			entered = append(entered, one)
		}
		now[one.GetMemberId()] = one
	}
	p.byMember = now
	return entered
}

// pullProgress keeps the progress of a node's pulls in memory and hands on only those that have entered a phase.
func (c *connection) pullProgress(ctx context.Context, m *protocol.PullProgress) error {
	c.mu.Lock()
	entered := c.pulls.replace(m)
	c.mu.Unlock()
	if len(entered) == 0 {
		return nil
	}
	return c.handler.PullPhases(ctx, c.peer, entered)
}

// ImagePull returns how far a connected node is with the image of a member; nil where it pulls none.
func (s *Server) ImagePull(nodeID, memberID string) *protocol.ImagePull {
	c := s.find(nodeID)
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pulls.byMember[memberID]
}
