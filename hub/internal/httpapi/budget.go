package httpapi

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"golang.org/x/time/rate"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// The budgets of requests. A caller without a valid credential counts for its address, for the prefix that one customer
// of a provider usually has, and for all such callers together; one with a credential for itself, for its org, and for
// all.
const (
	// Twenty instances that are launched at once and each watched make some sixty requests a second.
	defaultRequestsPerSecond = 100
	defaultBurst             = 500
	// orgShare and apiShare are how many callers' rates an org, and all callers together, may use.
	orgShare = 4
	apiShare = 20

	visitorsPerSecond  = 20
	visitorsBurst      = 200
	prefixPerSecond    = 100
	prefixBurst        = 1000
	anonymousPerSecond = 500
	anonymousBurst     = 2000

	// People mistype a few times; who guesses passwords gets 60 attempts an hour for an account, and 360 from an address.
	loginsPerSecond        = 1.0 / 60
	loginsBurst            = 10
	addressLoginsPerSecond = 1.0 / 10
	addressLoginsBurst     = 30

	// A node asks for a certificate a few times a day, and for each image a few requests for each of its layers.
	nodePerSecond  = 50
	nodeBurst      = 1000
	nodesPerSecond = 1000
	nodesBurst     = 10_000

	// A transfer through the registry is charged by its bytes, too. The burst is one layer of the largest size.
	defaultRegistryBytesPerSecond = 256 << 20
	defaultRegistryBurstBytes     = artifact.MaxUploadBytes

	// Callers may ask that their requests be traced, an address this many times.
	addressTracesPerSecond = 10
	addressTracesBurst     = 100
	tracesPerSecond        = 50
	tracesBurst            = 500

	// rowShare is the part of a caller's rate that may leave audit rows by failing; a burst of requests may leave a row
	// each.
	rowShare = 50
	// anonymousRowsPerSecond bounds the audit rows of all refused callers without a credential together.
	anonymousRowsPerSecond = 1
	anonymousRowsBurst     = 60
)

// The units of budgets.
const (
	unitRequests = "requests"
	unitBytes    = "bytes"
)

// budget gives each key a token bucket of requests, or of bytes.
type budget struct {
	name      string
	unit      string
	perSecond rate.Limit
	burst     int
	// buckets has the keys that were charged last: as many as the total can admit while a bucket fills up, so that the
	// bucket of a forgotten key would be full again.
	buckets *simplelru.LRU[string, *rate.Limiter]
}

// newBudget makes a budget whose keys are all charged to total, too; total is nil for a total itself.
func newBudget(name string, perSecond float64, burst int, total *budget) *budget {
	keys := 1
	if total != nil {
		refillSeconds := float64(burst) / perSecond
		keys = total.burst + int(math.Ceil(float64(total.perSecond)*refillSeconds))
	}
	buckets, _ := simplelru.NewLRU[string, *rate.Limiter](keys, nil) // fails only for no keys at all
	return &budget{name: name, unit: unitRequests, perSecond: rate.Limit(perSecond), burst: burst, buckets: buckets}
}

// newByteBudget makes a budget of bytes; its callers have charged a request to the budget requests before.
func newByteBudget(name string, perSecond float64, burst int, requests *budget) *budget {
	b := newBudget(name, perSecond, burst, requests)
	b.unit = unitBytes
	return b
}

// wait is how long until the key has n left, or a full bucket where that is less; zero when it has.
func (b *budget) wait(key string, n int, now time.Time) time.Duration {
	limiter, ok := b.buckets.Peek(key)
	if !ok {
		return 0
	}
	wanted, left := float64(min(n, b.burst)), limiter.TokensAt(now)
	if left >= wanted {
		return 0
	}
	return time.Duration(math.Ceil((wanted - left) / float64(b.perSecond) * float64(time.Second)))
}

// charge takes n from the key. What the bucket does not have is owed.
func (b *budget) charge(key string, n int, now time.Time) {
	limiter, ok := b.buckets.Get(key)
	if !ok {
		limiter = rate.NewLimiter(b.perSecond, b.burst)
		b.buckets.Add(key, limiter)
	}
	for n > 0 {
		piece := min(n, b.burst)
		limiter.ReserveN(now, piece)
		n -= piece
	}
}

// charge is a key of a budget.
type charge struct {
	*budget
	key string
}

// budgets are all budgets of the process, under one lock: a request is charged to each of its budgets or to none.
type budgets struct {
	mu sync.Mutex

	address, prefix, anonymous *budget
	caller, org, api           *budget
	node, nodes                *budget
	// Attempts to log in.
	logins, addressLogins *budget
	// What the registry's transfers move.
	callerBytes, orgBytes, nodeBytes *budget
	// Traces that callers asked for.
	addressTraces, traces *budget
	// What failing requests write to the audit trail.
	addressRows, anonymousRows          *budget
	callerRows, orgRows, identifiedRows *budget
}

func newBudgets(conf Config) *budgets {
	perSecond, burst := conf.RequestsPerSecond, conf.Burst
	bytesPerSecond, burstBytes := conf.RegistryBytesPerSecond, conf.RegistryBurstBytes
	b := &budgets{
		anonymous:      newBudget("anonymous", anonymousPerSecond, anonymousBurst, nil),
		api:            newBudget("api", apiShare*perSecond, apiShare*burst, nil),
		nodes:          newBudget("nodes", nodesPerSecond, nodesBurst, nil),
		traces:         newBudget("traces", tracesPerSecond, tracesBurst, nil),
		anonymousRows:  newBudget("anonymous_rows", anonymousRowsPerSecond, anonymousRowsBurst, nil),
		identifiedRows: newBudget("rows", apiShare*perSecond/rowShare, apiShare*burst, nil),
	}
	b.address = newBudget("address", visitorsPerSecond, visitorsBurst, b.anonymous)
	b.prefix = newBudget("prefix", prefixPerSecond, prefixBurst, b.anonymous)
	b.logins = newBudget("logins", loginsPerSecond, loginsBurst, b.anonymous)
	b.addressLogins = newBudget("address_logins", addressLoginsPerSecond, addressLoginsBurst, b.anonymous)
	b.caller = newBudget("caller", perSecond, burst, b.api)
	b.org = newBudget("org", orgShare*perSecond, orgShare*burst, b.api)
	b.node = newBudget("node", nodePerSecond, nodeBurst, b.nodes)
	b.callerBytes = newByteBudget("caller_bytes", bytesPerSecond, burstBytes, b.api)
	b.orgBytes = newByteBudget("org_bytes", orgShare*bytesPerSecond, orgShare*burstBytes, b.api)
	b.nodeBytes = newByteBudget("node_bytes", bytesPerSecond, burstBytes, b.nodes)
	b.addressTraces = newBudget("address_traces", addressTracesPerSecond, addressTracesBurst, b.traces)
	b.addressRows = newBudget("address_rows", 1/time.Minute.Seconds(), 1, b.anonymousRows)
	b.callerRows = newBudget("caller_rows", perSecond/rowShare, burst, b.identifiedRows)
	b.orgRows = newBudget("org_rows", orgShare*perSecond/rowShare, orgShare*burst, b.identifiedRows)
	return b
}

func (b *budgets) ofVisitor(ip string) []charge {
	address, prefix := prefixes(ip)
	return []charge{{b.address, address}, {b.prefix, prefix}, {b.anonymous, ""}}
}

// ofGuess is charged for a request with a password, which body has; nothing for another.
func (b *budgets) ofGuess(state *call, body []byte) []charge {
	var account string
	switch state.op.id {
	case loginOperation:
		var login Login
		_ = json.Unmarshal(body, &login) // it follows the contract
		account = iam.FoldEmail(login.Email)
	case passwordOperation:
		account = state.principal.ID
	default:
		return nil
	}
	address, _ := prefixes(state.remoteIP)
	return []charge{{b.logins, account}, {b.addressLogins, address}}
}

func (b *budgets) ofNode(name string) []charge {
	return []charge{{b.node, name}, {b.nodes, ""}}
}

func (b *budgets) ofCaller(id callerID) []charge {
	return append(chargesOf(id, b.caller, b.org), charge{b.api, ""})
}

// chargesOf leaves the org out where it is empty, as for platform admins and for images of the platform.
func chargesOf(id callerID, caller, org *budget) []charge {
	if id.org == "" {
		return []charge{{caller, id.key}}
	}
	return []charge{{caller, id.key}, {org, id.org}}
}

// ofRow is charged for an audit row of a failed request; an empty caller is one without a valid credential.
func (b *budgets) ofRow(id callerID, ip string) []charge {
	if id.key == "" {
		address, _ := prefixes(ip)
		return []charge{{b.addressRows, address}, {b.anonymousRows, ""}}
	}
	return append(chargesOf(id, b.callerRows, b.orgRows), charge{b.identifiedRows, ""})
}

// ofTrace is charged for a trace that is sent to the collector because its caller asks for it.
func (b *budgets) ofTrace(ip string) []charge {
	address, _ := prefixes(ip)
	return []charge{{b.addressTraces, address}, {b.traces, ""}}
}

// bytesOfNode are charged with what a node moves through the registry.
func (b *budgets) bytesOfNode(name string) []charge { return []charge{{b.nodeBytes, name}} }

// bytesOfCaller are charged with what a caller moves through the registry.
func (b *budgets) bytesOfCaller(id callerID) []charge {
	return chargesOf(id, b.callerBytes, b.orgBytes)
}

// spend takes one request from each budget. Where one has none left it takes nothing and names that one.
func (b *budgets) spend(charges []charge, now time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := exhausted(charges, 1, now); err != nil {
		return err
	}
	for _, c := range charges {
		c.charge(c.key, 1, now)
	}
	return nil
}

// check names a budget that has not n left. It takes nothing.
func (b *budgets) check(charges []charge, n int, now time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return exhausted(charges, n, now)
}

// moved charges n bytes that a transfer has moved, whatever is left: an admitted transfer is not broken off.
func (b *budgets) moved(charges []charge, n int, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range charges {
		c.charge(c.key, n, now)
	}
}

func exhausted(charges []charge, n int, now time.Time) error {
	for _, c := range charges {
		if wait := c.wait(c.key, n, now); wait > 0 {
			perSecond := strconv.FormatFloat(float64(c.perSecond), 'f', -1, 64)
			return fault.New(fault.RateLimited, fault.CodeRateLimited,
				fmt.Sprintf("Too many %s: the budget %q is used up. Wait as long as Retry-After says.", c.unit, c.name), nil).
				WithField("budget/"+c.name, "allows "+perSecond+" "+c.unit+" a second").RetryAfter(wait)
		}
	}
	return nil
}
