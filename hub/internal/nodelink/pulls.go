package nodelink

import (
	"context"

	"github.com/gpuaas/gpuaas/protocol"
)

// maxPulls bounds the pulls that are kept of one node.
const maxPulls = 64

// pulls are the pulls under way on a node. The mutex of the connection guards them.
type pulls struct {
	byMember map[string]*protocol.ImagePull
}

// replace stores what the node says now, and returns the pulls that have entered a phase since.
func (p *pulls) replace(m *protocol.PullProgress) (entered []*protocol.ImagePull) {
	now := map[string]*protocol.ImagePull{}
	for _, one := range m.GetPulls()[:min(len(m.GetPulls()), maxPulls)] {
		before := p.byMember[one.GetMemberId()]
		if before == nil || before.GetPhase() != one.GetPhase() {
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
