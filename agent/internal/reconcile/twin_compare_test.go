package reconcile_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/protocol"
)

// view is all that can be compared of a node.
type view struct {
	Containers []agent.Listed
	Networks   []string
	Members    map[string]agent.Member
	Removals   map[string]string
	Runs       map[string]agent.Run
	Stamp      clock.Stamp
	Consumed   map[string]map[string]int64
	Segments   []string
	Statuses   []string
}

func (w *twin) compare() {
	w.t.Helper()
	require.NoError(w.t, w.node.Broken())
	product, model := w.product(), w.model()
	if a, b := indented(w.t, product), indented(w.t, model); a != b {
		require.Equal(w.t, a, b, "the product and the simulation, after:\n%s", strings.Join(w.log, "\n"))
	}
	w.tally(model)
}

func indented(t *testing.T, v view) string {
	t.Helper()
	raw, err := json.MarshalIndent(v, "", " ")
	require.NoError(t, err)
	return string(raw)
}

func (w *twin) product() view {
	v := view{
		Networks: []string{}, Members: map[string]agent.Member{}, Removals: map[string]string{}, Runs: w.store.Runs(),
		Stamp: w.store.LastStamp(), Consumed: map[string]map[string]int64{}, Containers: []agent.Listed{},
	}
	h := agentHandle{w.machine, nil}
	listed, err := h.List(w.t.Context())
	require.NoError(w.t, err)
	for _, c := range listed {
		v.Containers = append(v.Containers, reconcile.ListedOf(c))
	}
	v.Networks, err = netHandle{h}.List()
	require.NoError(w.t, err)
	for id, m := range w.store.Members() {
		v.member(m.Member)
		v.Consumed[id] = w.store.Consumed(id)
	}
	for number := uint64(1); number <= w.store.Spool().LastSegment; number++ {
		env, err := w.store.Segment(number)
		require.NoError(w.t, err)
		v.segment(w.t, env.GetPayload())
	}
	v.statuses(w.loop.Report().Workloads)
	return v
}

func (w *twin) model() view {
	s := w.node.Store()
	v := view{
		Containers: w.node.Containers(), Networks: w.node.Networks(), Members: map[string]agent.Member{},
		Removals: map[string]string{}, Runs: s.Runs, Stamp: s.Stamp, Consumed: map[string]map[string]int64{},
	}
	for id, m := range s.Members {
		v.member(m.Member)
		v.Consumed[id] = s.Consumed[id]
	}
	for number := uint64(1); number <= s.Chain.Number; number++ {
		v.segment(w.t, s.Segments[number].Payload)
	}
	v.statuses(w.node.Report())
	return v
}

func (v *view) member(m agent.Member) {
	if m.Removal != nil {
		v.Removals[m.ID] = m.Removal.String()
	}
	m.Removal, m.Endpoints = nil, nil // the twins publish nothing
	v.Members[m.ID] = m
}

func (v *view) segment(t *testing.T, payload []byte) {
	t.Helper()
	seg := &protocol.UsageSegment{}
	require.NoError(t, proto.Unmarshal(payload, seg))
	v.Segments = append(v.Segments, seg.String())
}

func (v *view) statuses(all []*protocol.WorkloadStatus) {
	for _, s := range all {
		v.Statuses = append(v.Statuses, s.String())
	}
}

// tally counts what the sequences come by.
func (w *twin) tally(v view) {
	count := func(what string, is bool) {
		if is {
			w.seen[what]++
		}
	}
	for _, s := range w.node.Report() {
		count("ready", s.GetStatus() == protocol.WorkloadStatus_READY)
		count("failed", s.GetStatus() == protocol.WorkloadStatus_FAILED)
		count("lease ended", s.GetReason() == protocol.WorkloadStatus_LEASE_ENDED)
	}
	count("ports moved", w.machine.moved.Load() > 0)
	for _, m := range v.Members {
		count("restarted", m.Restarts > 0)
		for _, r := range m.Services {
			count("gave up", r.GaveUp)
		}
		count("fell back", m.FellBackFrom > 0)
		count("confirmed", m.ConfirmedRevision > 0)
	}
	for _, b := range w.node.Busy() {
		count("pulling", len(b.Pulling) > 0)
	}
	count("waits for a document", len(w.node.Store().Desired().Missing) > 0)
}
