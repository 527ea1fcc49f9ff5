package nodelink

import "github.com/gpuaas/gpuaas/protocol"

// maxPulls bounds the pulls that are kept of one node.
const maxPulls = 64

// storePulls replaces what the node said of its pulls before.
func (c *connection) storePulls(p *protocol.PullProgress) {
	pulls := map[string]*protocol.ImagePull{}
	for _, one := range p.GetPulls()[:min(len(p.GetPulls()), maxPulls)] {
		pulls[one.GetMemberId()] = one
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pulls = pulls
}

// ImagePull returns how far a connected node is with the image of a member; nil where it pulls none.
func (s *Server) ImagePull(nodeID, memberID string) *protocol.ImagePull {
	c := s.find(nodeID)
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pulls[memberID]
}
