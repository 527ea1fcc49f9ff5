package nodelink

import (
	"fmt"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// tunnelRetryAfter is when a caller whose tunnel was refused may try again.
const tunnelRetryAfter = 10 * time.Second

// tunnels counts the open tunnels of one connection by org: orgs share the node, and none may use all tunnels.
type tunnels struct {
	mu    sync.Mutex
	open  map[string]int
	total int
}

// acquire reserves one of the org's tunnels until free is called.
func (t *tunnels) acquire(orgID string) (free func(), err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	busy := func(format string, n int) error {
		return fault.New(fault.RateLimited, codeTunnelsBusy, fmt.Sprintf(format, n), nil).RetryAfter(tunnelRetryAfter)
	}
	if t.open[orgID] >= maxOrgTunnels {
		return nil, busy("Your org has %d streams to this node open already; close one.", maxOrgTunnels)
	}
	if t.total >= maxTunnels {
		return nil, busy("%d streams to this node are open already; try again in a moment.", maxTunnels)
	}
	if t.open == nil {
		t.open = map[string]int{}
	}
	t.open[orgID]++
	t.total++
	return sync.OnceFunc(func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.total--
		if t.open[orgID]--; t.open[orgID] == 0 {
			delete(t.open, orgID)
		}
	}), nil
}
