package agent_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// situation is the input of one golden file. Most have the member "web", whose revision 2 has run before.
type situation struct {
	desired  agent.Desired
	leases   agent.Leases
	observed agent.Observed
}

// TestGoldenDiffs shows each decision as a file: the actions and the status for one situation.
func TestGoldenDiffs(t *testing.T) {
	for _, group := range []map[string]situation{
		startSituations(), leaseSituations(), refusalSituations(), upgradeSituations(), fallbackSituations(),
		exitSituations(), decommissionSituations(), busySituations(), configSituations(),
	} {
		for name, s := range group {
			t.Run(name, func(t *testing.T) { compareGolden(t, s) })
		}
	}
}

func compareGolden(t *testing.T, s situation) {
	type step struct {
		Action string
		On     agent.Action
	}
	var out struct {
		Actions  []step
		Statuses []*protocol.WorkloadStatus
		Next     time.Time `json:"Next,omitzero"`
	}
	for _, a := range agent.Diff(s.desired, s.leases, s.observed, noon) {
		out.Actions = append(out.Actions, step{fmt.Sprintf("%T", a), a})
	}
	out.Statuses = agent.Statuses(s.desired, s.leases, s.observed, noon)
	out.Next = agent.NextChange(s.desired, s.leases, s.observed, noon)
	got, err := json.MarshalIndent(out, "", "  ")
	require.NoError(t, err)
	path := filepath.Join("testdata", filepath.Base(t.Name())+".golden.json")
	if *update {
		require.NoError(t, os.WriteFile(path, append(got, '\n'), 0o600))
	}
	golden, err := os.ReadFile(path)
	require.NoError(t, err, "run with -update to write it")
	require.JSONEq(t, string(golden), string(got))
}

func web(revision uint64) agent.Workload {
	return agent.Workload{
		MemberID: "web", InstanceID: "i-web", Revision: revision, CorrelationID: "corr",
		Services: []agent.Service{{
			Name: "app", Images: []string{"org/acme/web/app@sha256:1"}, SpecDigest: fmt.Sprint("spec", revision),
			StopGrace: 3 * time.Second,
		}},
	}
}

// upgrade is revision 3 with revision 2 as its fallback.
func upgrade() agent.Workload {
	w, back := web(3), web(2)
	w.Fallback, w.ReadinessTimeout = &back, time.Minute
	return w
}

func refused(w agent.Workload) agent.Workload {
	w.Refused, w.RefusedDetail = protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED, "the image is not in the manifest"
	return w
}

func stopped(w agent.Workload) agent.Workload {
	w.Stopped = true
	return w
}

func desired(all ...agent.Workload) agent.Desired { return agent.Desired{Workloads: all} }

func week(id string) agent.Leases {
	return agent.Leases{id: {MemberID: id, No: 1, ExpiresAt: noon.Add(7 * 24 * time.Hour)}}
}

// leaseUntil is the third lease of web.
func leaseUntil(end time.Time, exhausted bool) agent.Leases {
	return agent.Leases{"web": {MemberID: "web", No: 3, ExpiresAt: end, Exhausted: exhausted}}
}

func running(w agent.Workload) agent.Container {
	return agent.Container{
		ID: "c1", MemberID: w.MemberID, InstanceID: w.InstanceID, Service: "app", Revision: w.Revision,
		SpecDigest: w.Services[0].SpecDigest, Status: agent.Running, StartedAt: noon.Add(-time.Hour),
		ReadyAt: noon.Add(-59 * time.Minute),
	}
}

func notReady(w agent.Workload) agent.Container {
	c := running(w)
	c.ReadyAt = time.Time{}
	return c
}

func failing(w agent.Workload) agent.Container {
	c := running(w)
	c.Failing = true
	return c
}

func exited(w agent.Workload, recorded bool) agent.Container {
	c := notReady(w)
	c.Status, c.ExitedAt, c.ExitCode, c.ExitRecorded = agent.Exited, noon, 1, recorded
	return c
}

func member() agent.Member { return agent.Member{ID: "web", InstanceID: "i-web"} }

// failed is the member after n failures of the revision in a row.
func failed(revision uint64, n int, reason protocol.WorkloadStatus_Reason) agent.Member {
	m := member()
	for range n {
		m = m.Failed(revision, reason, "exit code 1", false, time.Second, noon)
	}
	return m
}

func fellBack(m agent.Member) agent.Member {
	m.FellBackFrom, m.FallbackReason, m.FallbackDetail = 3, protocol.WorkloadStatus_READINESS_TIMEOUT,
		"not ready within 1m0s"
	return m
}

// observed is a machine with this member, its containers, and the network of its service, unless that is 0.
func observed(m agent.Member, network uint64, containers ...agent.Container) agent.Observed {
	o := agent.Observed{Members: map[string]agent.Member{m.ID: m}, Containers: containers}
	if network > 0 {
		o.Networks = []agent.Network{{MemberID: m.ID, Service: "app", Ready: true}}
	}
	return o
}

func withImage(o agent.Observed) agent.Observed {
	o.Images = map[string]bool{"org/acme/web/app@sha256:1": true}
	return o
}

func withBusy(o agent.Observed, work agent.Work) agent.Observed {
	o.Busy = map[string]agent.Work{"web": work}
	return o
}

// ready is a machine where revision 2 serves.
func ready() agent.Observed { return observed(member(), 2, running(web(2))) }

func startSituations() map[string]situation {
	d, l := desired(web(2)), week("web")
	return map[string]situation{
		"first start":                 {d, l, observed(member(), 0)},
		"only the network is missing": {d, l, withImage(observed(member(), 0))},
		"image and network are there": {d, l, withImage(observed(member(), 2))},
		"ready":                       {d, l, ready()},
		"probe fails after ready":     {d, l, observed(member(), 2, failing(web(2)))},
		"not ready in time":           {d, l, observed(member(), 2, notReady(web(2)))},
		"image pull failed":           {d, l, observed(failed(2, 1, protocol.WorkloadStatus_IMAGE_PULL_FAILED), 2)},
		"document missing": {
			agent.Desired{Missing: []agent.MissingPart{{MemberID: "web", SHA256: [32]byte{1}}}}, l, ready(),
		},
		"stop":    {desired(stopped(web(2))), l, ready()},
		"stopped": {desired(stopped(web(2))), l, observed(member(), 0)},
	}
}

func leaseSituations() map[string]situation {
	d := desired(web(2))
	return map[string]situation{
		"no lease yet":            {d, nil, observed(member(), 0)},
		"lease ended":             {d, leaseUntil(noon, false), ready()},
		"lease ended and stopped": {d, leaseUntil(noon, false), observed(member(), 0)},
		"lease spent":             {d, leaseUntil(noon.Add(time.Hour), true), ready()},
	}
}

func refusalSituations() map[string]situation {
	d, l := desired(refused(web(2))), week("web")
	byOwner := web(2)
	byOwner.Refused, byOwner.RefusedDetail = protocol.WorkloadStatus_OWNER_REFUSED, "closed"
	otherSpec := web(2)
	otherSpec.Services[0].SpecDigest = "of an agent that knows more of it"
	return map[string]situation{
		"refused":                           {d, l, observed(member(), 0)},
		"refused while it runs":             {d, l, ready()},
		"refused while it runs and it ends": {d, l, observed(member(), 2, exited(web(2), true))},
		"refused while it runs unleased":    {d, nil, ready()},
		"refused while another spec runs":   {d, l, observed(member(), 2, running(otherSpec))},
		"refused by the owner":              {desired(byOwner), l, ready()},
	}
}

func upgradeSituations() map[string]situation {
	d, l := desired(upgrade()), week("web")
	const pullFailed, crashLoop = protocol.WorkloadStatus_IMAGE_PULL_FAILED, protocol.WorkloadStatus_CRASH_LOOP
	confirmed := failed(3, agent.CrashLoopAfter, crashLoop)
	confirmed.ConfirmedRevision = 3
	withoutFallback := refused(web(3))
	withoutFallback.ReadinessTimeout = time.Minute
	return map[string]situation{
		"upgrade":                             {desired(web(3)), l, ready()},
		"upgrade network":                     {desired(web(3)), l, withImage(observed(member(), 2))},
		"upgrade gets its image first":        {d, l, ready()},
		"upgrade waits for its image":         {d, l, observed(failed(3, 2, pullFailed), 2, running(web(2)))},
		"upgrade with its image there":        {d, l, withImage(ready())},
		"upgrade ready":                       {d, l, observed(member(), 3, running(upgrade()))},
		"upgrade never gets its image":        {d, l, observed(failed(3, agent.GiveUpAfter, pullFailed), 2, running(web(2)))},
		"upgrade is not ready in time":        {d, l, observed(member(), 3, notReady(upgrade()))},
		"upgrade crashes":                     {d, l, withImage(observed(failed(3, agent.CrashLoopAfter, crashLoop), 3))},
		"upgrade settled and crashes":         {d, l, withImage(observed(confirmed, 3))},
		"upgrade is refused":                  {desired(refused(upgrade())), l, ready()},
		"upgrade without fallback is refused": {desired(withoutFallback), l, ready()},
	}
}

func fallbackSituations() map[string]situation {
	d, l, m := desired(upgrade()), week("web"), fellBack(member())
	crashLoop := fellBack(failed(2, agent.CrashLoopAfter, protocol.WorkloadStatus_CRASH_LOOP))
	return map[string]situation{
		"fallback the failed one ends": {d, l, withImage(observed(m, 3, notReady(upgrade())))},
		"fallback network":             {d, l, withImage(observed(m, 3))},
		"fallback starts":              {d, l, withImage(observed(m, 2))},
		"fallback runs":                {d, l, observed(m, 2, running(web(2)))},
		"fallback fails too":           {d, l, withImage(observed(crashLoop, 2))},
		"fallback refused main":        {desired(refused(upgrade())), l, observed(m, 2, running(web(2)))},
		"fallback lease ended":         {d, leaseUntil(noon, false), observed(member(), 3, notReady(upgrade()))},
	}
}

func exitSituations() map[string]situation {
	d, l := desired(web(2)), week("web")
	crashes := func(n int) agent.Member { return failed(2, n, protocol.WorkloadStatus_CRASH_LOOP) }
	return map[string]situation{
		"exited":               {d, l, observed(member(), 2, exited(web(2), false))},
		"exit recorded":        {d, l, observed(crashes(1), 2, exited(web(2), true))},
		"pause before restart": {d, l, withImage(observed(crashes(2), 2))},
		"crash loop":           {d, l, withImage(observed(crashes(5), 2))},
	}
}

func configSituations() map[string]situation {
	w := web(2)
	secrets := web(2)
	secrets.Services[0].SecretsSHA256 = "0c"
	w.Services[0].ConfigSHA256 = "0b"
	has := func(sum string) agent.Observed {
		c := running(w)
		c.ConfigSHA256 = sum
		return observed(member(), 2, c)
	}
	return map[string]situation{
		"config changed":                     {desired(w), week("web"), has("0a")},
		"config delivered":                   {desired(w), week("web"), has("0b")},
		"secrets changed":                    {desired(secrets), week("web"), observed(member(), 2, running(secrets))},
		"config changed and the lease ended": {desired(w), leaseUntil(noon.Add(-time.Second), false), has("0a")},
	}
}

func decommissionSituations() map[string]situation {
	var d agent.Desired
	gone := member().Failed(1, 0, "", false, 0, noon)
	gone.Removal = &protocol.RemovalProof{Absent: []string{"container"}}
	return map[string]situation{
		"decommission":              {d, nil, ready()},
		"decommission exited":       {d, nil, observed(member(), 2, exited(web(2), true))},
		"decommission network":      {d, nil, observed(member(), 2)},
		"decommission nothing left": {d, nil, observed(member(), 0)},
		"decommissioned":            {d, nil, observed(gone, 0)},
		"decommission during the pull": {
			d, nil, withBusy(observed(member(), 0), agent.Work{Pulling: []string{"org/acme/web/app@sha256:1"}}),
		},
	}
}

func busySituations() map[string]situation {
	next := agent.Workload{
		MemberID: "next", Revision: 1,
		Services: []agent.Service{{Name: "app", Images: []string{"i"}, AcceleratorIDs: []string{"gpu0"}}},
	}
	inUse := observed(agent.Member{ID: "next"}, 1, agent.Container{
		ID: "c0", MemberID: "old", Service: "app", Status: agent.Running, AcceleratorIDs: []string{"gpu0"}, StartedAt: noon,
	})
	inUse.Images = map[string]bool{"i": true}
	return map[string]situation{
		"busy":                   {agent.Desired{}, nil, withBusy(observed(member(), 0), agent.Work{Other: true})},
		"accelerator still held": {desired(next), week("next"), inUse},
	}
}
