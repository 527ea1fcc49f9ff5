package httpapi

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// How many requests may be under way at once. A body, an answer and a stream cost memory for as long as they last.
const (
	maxVisitorRequests   = 32
	maxPrefixRequests    = 128
	maxAnonymousRequests = 512
	maxCallerRequests    = 100
	maxOrgRequests       = 1000
	maxCallerWatchers    = 50
	maxOrgWatchers       = 500
	maxCallerLogStreams  = 10
	maxOrgLogStreams     = 50
	maxCallerAppStreams  = 40
	maxOrgAppStreams     = 200
	maxNodeRequests      = 64
	maxAddressRenewals   = 256
	// slotRetryAfter is when a caller without a free slot may come back: requests are short, streams are not.
	slotRetryAfter = time.Second
)

// slot is one of max concurrent requests of key; what names the budget.
type slot struct {
	what string
	key  string
	max  int
}

// slots counts concurrent requests. It holds a key only while the key has one.
type slots struct {
	mu   sync.Mutex
	used map[slot]int
}

// acquire takes all slots or none; the fault names the budget that is used up. release gives them back.
func (s *slots) acquire(wanted ...slot) (release func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range wanted {
		if s.used[w] >= w.max {
			return nil, fault.New(fault.RateLimited, codeTooManyAtOnce,
				fmt.Sprintf("%d requests of the budget %q are under way already; end one, or try again in a moment.", w.max,
					w.what), nil).
				WithField("budget/"+w.what, fmt.Sprintf("allows %d at once", w.max)).RetryAfter(slotRetryAfter)
		}
	}
	if s.used == nil {
		s.used = map[slot]int{}
	}
	for _, w := range wanted {
		s.used[w]++
	}
	return sync.OnceFunc(func() { s.release(wanted) }), nil
}

func (s *slots) release(held []slot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, w := range held {
		if s.used[w]--; s.used[w] == 0 {
			delete(s.used, w)
		}
	}
}

func slotsOfVisitor(ip string) []slot {
	address, prefix := prefixes(ip)
	return []slot{
		{"address_at_once", address, maxVisitorRequests},
		{"prefix_at_once", prefix, maxPrefixRequests},
		{"anonymous_at_once", "", maxAnonymousRequests},
	}
}

func slotsOfNode(name string) []slot { return []slot{{"node_at_once", name, maxNodeRequests}} }

// slotsOfCaller are those of an operation; watchers and log streams stay open for long and have slots of their own too.
func slotsOfCaller(id callerID, operation string, waits bool) []slot {
	out := ofCallerAndOrg(nil, "requests_at_once", id, maxCallerRequests, maxOrgRequests)
	switch {
	case waits, operation == "streamEvents", operation == "followEvents":
		out = ofCallerAndOrg(out, "watchers", id, maxCallerWatchers, maxOrgWatchers)
	case operation == "getAppInstanceLogs":
		out = ofCallerAndOrg(out, "log_streams", id, maxCallerLogStreams, maxOrgLogStreams)
	case slices.Contains([]string{"forwardAppInstancePort", "execInAppInstance", "copyAppInstanceFiles"}, operation):
		out = ofCallerAndOrg(out, "app_streams", id, maxCallerAppStreams, maxOrgAppStreams)
	}
	return out
}

func ofCallerAndOrg(out []slot, what string, id callerID, caller, org int) []slot {
	out = append(out, slot{"caller_" + what, id.key, caller})
	if id.org != "" {
		out = append(out, slot{"org_" + what, id.org, org})
	}
	return out
}
