package httpapi

import (
	"fmt"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// How many requests may be under way at once. A body, an answer and a stream cost memory for as long as they last.
const (
	maxVisitorRequests   = 32
	maxAnonymousRequests = 512
	maxCallerRequests    = 100
	maxOrgRequests       = 1000
	maxCallerWatchers    = 50
	maxOrgWatchers       = 500
	maxCallerLogStreams  = 10
	maxOrgLogStreams     = 50
	maxNodeRequests      = 64
	maxAddressRenewals   = 256
	// placeRetryAfter is when a caller whose places are all taken may come back: requests are short, streams are not.
	placeRetryAfter = time.Second
)

// place is one of max places that key has in what.
type place struct {
	what string
	key  string
	max  int
}

// places counts requests under way. It remembers a key only while it has one.
type places struct {
	mu    sync.Mutex
	taken map[place]int
}

// take takes all places or none. Where one is missing it names what there are too many of.
func (p *places) take(wanted ...place) (leave func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range wanted {
		if p.taken[w] >= w.max {
			return nil, fault.New(fault.RateLimited, "too_many_at_once",
				fmt.Sprintf("%d requests of the budget %q are under way already; end one, or try again in a moment.", w.max,
					w.what), nil).
				WithField("budget/"+w.what, fmt.Sprintf("allows %d at once", w.max)).RetryAfter(placeRetryAfter)
		}
	}
	if p.taken == nil {
		p.taken = map[place]int{}
	}
	for _, w := range wanted {
		p.taken[w]++
	}
	return sync.OnceFunc(func() { p.leave(wanted) }), nil
}

func (p *places) leave(taken []place) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range taken {
		if p.taken[w]--; p.taken[w] == 0 {
			delete(p.taken, w)
		}
	}
}

func placesOfVisitor(ip string) []place {
	address, _ := prefixes(ip)
	return []place{{"address_at_once", address, maxVisitorRequests}, {"anonymous_at_once", "", maxAnonymousRequests}}
}

func placesOfNode(name string) []place { return []place{{"node_at_once", name, maxNodeRequests}} }

// placesOfCaller are those of an operation; what stays open for long has places of its own beside.
func placesOfCaller(id callerID, operation string, waits bool) []place {
	out := ofCallerAndOrg(nil, "requests_at_once", id, maxCallerRequests, maxOrgRequests)
	switch {
	case waits:
		out = ofCallerAndOrg(out, "watchers", id, maxCallerWatchers, maxOrgWatchers)
	case operation == "getAppInstanceLogs":
		out = ofCallerAndOrg(out, "log_streams", id, maxCallerLogStreams, maxOrgLogStreams)
	}
	return out
}

func ofCallerAndOrg(out []place, what string, id callerID, caller, org int) []place {
	out = append(out, place{"caller_" + what, id.key, caller})
	if id.org != "" {
		out = append(out, place{"org_" + what, id.org, org})
	}
	return out
}
