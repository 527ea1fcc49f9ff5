package harness_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
)

// began is when the containers of these tests start.
var began = time.Unix(1_000_000, 0)

// ran is a process that ran for so long, and whose start is known to 10 ms.
func ran(hostname string, from, to time.Duration) harness.ContainerProcess {
	return harness.ContainerProcess{
		Hostname: hostname, NotStartedAt: began.Add(from - 10*time.Millisecond), StartedAt: began.Add(from),
		EndedAt: began.Add(to),
	}
}

// after is a time so many milliseconds after the start.
func after(millis int) time.Time { return began.Add(time.Duration(millis) * time.Millisecond) }

const second = time.Second

// twoRuns are those of a service, beside one of another service.
func twoRuns() map[string]harness.ContainerProcess {
	return map[string]harness.ContainerProcess{
		"m.1": ran("web", 0, 10*second), "m.2": ran("web", 20*second, 30*second), "m.3": ran("db", 0, 10*second),
	}
}

// audited is what an audit compares, and what it finds; empty for nothing.
type audited struct {
	seen   harness.Observed
	faults harness.Faults
	finds  string
}

func requireFindings(t *testing.T, cases map[string]audited) {
	t.Helper()
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			found := c.seen.Findings(c.faults)
			if c.finds == "" {
				require.Empty(t, found)
				return
			}
			require.Len(t, found, 1)
			require.Contains(t, found[0], c.finds)
		})
	}
}

func TestAnAuditFindsNeedlessRestartsAndSuspense(t *testing.T) {
	billed := map[string]time.Duration{"m.1": 10 * second, "m.2": 9500 * time.Millisecond}
	two := twoRuns()
	requireFindings(t, map[string]audited{
		"all explained": {
			harness.Observed{Billed: billed, Processes: two, Suspense: []string{"late"}, Final: map[string]bool{"m": true}},
			harness.Faults{Restarts: 1, Suspense: []string{"late"}},
			"",
		},
		"phantom": {
			harness.Observed{Billed: map[string]time.Duration{"n.1": 1}, Processes: two},
			harness.Faults{Restarts: 1},
			"phantom bill: no process of run n.1",
		},
		"restart": {harness.Observed{Processes: two}, harness.Faults{}, "needless restarts: 1"},
		"requested": {
			harness.Observed{Processes: two, Requested: map[string]int{"m": 1}}, harness.Faults{}, "",
		},
		"suspense": {
			harness.Observed{Suspense: []string{"late", "early"}},
			harness.Faults{Suspense: []string{"early"}},
			"suspense without a fault: late",
		},
	})
}

func TestAnAuditFindsWrongBills(t *testing.T) {
	two, over := twoRuns(), 60*time.Millisecond+1
	requireFindings(t, map[string]audited{
		"most that may be billed": {
			harness.Observed{
				Billed:    map[string]time.Duration{"m.1": 20*second + over - 1},
				Processes: two,
			},
			harness.Faults{Restarts: 1},
			"",
		},
		"billed too much": {
			harness.Observed{Billed: map[string]time.Duration{"m.1": 20*second + over}, Processes: two},
			harness.Faults{Restarts: 1},
			"member m is billed 20.060000001s, its 2 runs took 20.02s at most",
		},
		"billed too much by a fault": {
			harness.Observed{Billed: map[string]time.Duration{"m.1": 20*second + over}, Processes: two},
			harness.Faults{Restarts: 1, Overbilled: 1},
			"",
		},
		"least that may be billed": {
			harness.Observed{
				Billed: map[string]time.Duration{"m.1": 18 * second}, Processes: two, Final: map[string]bool{"m": true},
			},
			harness.Faults{Restarts: 1},
			"",
		},
		"billed too little": {
			harness.Observed{
				Billed: map[string]time.Duration{"m.1": 18*second - 1}, Processes: two, Final: map[string]bool{"m": true},
			},
			harness.Faults{Restarts: 1},
			"member m is billed 17.999999999s, its 2 runs took 20s at least",
		},
		"billed too little by a fault": {
			harness.Observed{
				Billed: map[string]time.Duration{"m.1": 18*second - 1}, Processes: two, Final: map[string]bool{"m": true},
			},
			harness.Faults{Restarts: 1, Unbilled: 1},
			"",
		},
		"not final yet": {
			harness.Observed{Billed: map[string]time.Duration{"m.1": second}, Processes: two},
			harness.Faults{Restarts: 1},
			"",
		},
		"runs still": {
			harness.Observed{
				Billed:    map[string]time.Duration{"m.1": 31 * second},
				Processes: map[string]harness.ContainerProcess{"m.1": {NotStartedAt: began, StartedAt: began}},
				At:        began.Add(30 * second),
			},
			harness.Faults{},
			"member m is billed 31s, its 1 runs took 30s at most",
		},
	})
}

func TestAnAuditFindsNeedlessCalls(t *testing.T) {
	requireFindings(t, map[string]audited{
		"sessions": {
			harness.Observed{Nodes: []harness.NodeCalls{{Starts: 1, Sessions: 3}, {Starts: 3, Sessions: 1}}},
			harness.Faults{Sessions: 1},
			"needless sessions: 2 beyond the starts of agents and hubs, the faults explain 1",
		},
		"sessions by a fault": {
			harness.Observed{Nodes: []harness.NodeCalls{{Starts: 1, Sessions: 3}}}, harness.Faults{Sessions: 2}, "",
		},
		"enrolments": {
			harness.Observed{Nodes: []harness.NodeCalls{{Enrolled: 3}, {Enrolled: 1}}},
			harness.Faults{Enrolments: 1},
			"needless enrolments: 2 beyond the first of each node, the faults explain 1",
		},
		"dials": {
			harness.Observed{Nodes: []harness.NodeCalls{{Name: "node", RetryMax: 900 * time.Millisecond, Dials: [][]time.Time{
				{began}, {began, after(250), after(700)}, {began, after(250), after(699)},
			}}}},
			harness.Faults{},
			"node node dials again after 449ms, its pause is 450ms at least",
		},
		"dials without growth": {
			harness.Observed{Nodes: []harness.NodeCalls{{Name: "node", RetryMax: time.Second, Dials: [][]time.Time{
				{began, after(250), after(749)},
			}}}},
			harness.Faults{},
			"node node dials again after 499ms, its pause is 500ms at least",
		},
	})
}
