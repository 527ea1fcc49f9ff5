package state_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func anyPort(uint16) bool { return true }

// of are the ports of a service.
func of(service string, ports ...*protocol.Port) []state.ServicePort {
	var out []state.ServicePort
	for _, p := range ports {
		out = append(out, state.ServicePort{Service: service, Port: p})
	}
	return out
}

// pool lets tenants choose the ports from 30000.
func pool(from, to uint16, free func(uint16) bool) state.PortPool {
	return state.PortPool{
		From: from, To: to, Free: free, Tenants: func(port uint16) bool { return port >= 30000 },
		Published: func(string, uint16) uint16 { return 0 },
	}
}

// A port that a tenant chose is given to no other member, and the node itself never chooses one that tenants may.
func TestAChosenPortIsTheMembersOrNobodys(t *testing.T) {
	s := open(t, t.TempDir(), newMesh(t))
	free := func(p uint16) bool { return p != 30003 }
	assign := func(member string, ports ...*protocol.Port) ([]uint16, error) {
		got, err := s.AssignPorts(member, of("main", ports...), pool(29999, 30001, free), func(*state.Member) {})
		var hosts []uint16
		for _, p := range got {
			hosts = append(hosts, p.Host)
		}
		return hosts, err
	}
	web := func(host uint32) *protocol.Port {
		return &protocol.Port{Name: "http", ContainerPort: 80, HostPort: host}
	}
	shell := func(host uint32) *protocol.Port {
		return &protocol.Port{Name: "ssh", ContainerPort: 22, HostPort: host}
	}
	got, err := assign("a", web(30001), shell(0))
	require.NoError(t, err)
	require.Equal(t, []uint16{30001, 29999}, got)
	_, err = assign("b", web(0))
	require.True(t, fault.Is(err, fault.Unavailable), "the rest of the range is for tenants to choose: %v", err)
	for why, port := range map[string]uint32{"another member has it": 30001, "a program has it": 30003} {
		_, err = assign("b", web(port))
		require.True(t, agent.IsPortTaken(err), why)
		require.Empty(t, s.Members()["b"].Ports, why)
	}
	_, err = assign("b", web(30002), shell(30002))
	require.True(t, agent.IsPortTaken(err))

	got, err = assign("a", web(30002), shell(0))
	require.NoError(t, err)
	require.Equal(t, []uint16{30002, 29999}, got, "another choice moves the port")
	got, err = assign("a", web(0), shell(30002))
	require.NoError(t, err)
	require.Equal(t, []uint16{29999, 30002}, got, "what is chosen comes first")
	got, err = assign("b", web(30001))
	require.NoError(t, err)
	require.Equal(t, []uint16{30001}, got, "what was left is free")
	got, err = assign("b", web(0))
	require.True(t, fault.Is(err, fault.Unavailable), "a chosen port is not kept without the choice: %v, %v", got, err)
	fallback := of("main", web(0))
	fallback[0].Fallback = true
	kept, err := s.AssignPorts("b", fallback, pool(29999, 30001, free), func(*state.Member) {})
	require.NoError(t, err)
	require.EqualValues(t, 30001, kept[0].Host, "the fallback's choice stands")
}

func TestPortsStayWithTheirMember(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	web := []*protocol.Port{{Name: "http", ContainerPort: 8080, Protocol: "http"}, {
		Name: "ssh", ContainerPort: 22,
		Protocol: "tcp",
	}}
	free := func(p uint16) bool { return p != 20001 }
	a, err := s.AssignPorts("a", of("main", web...), pool(20000, 20004, free), func(*state.Member) {})
	require.NoError(t, err)
	require.Equal(t, []uint16{20000, 20002}, []uint16{a[0].Host, a[1].Host})
	b, err := s.AssignPorts("b", of("main", web[:1]...), pool(20000, 20004, free), func(*state.Member) {})
	require.NoError(t, err)
	require.EqualValues(t, 20003, b[0].Host)
	require.NoError(t, s.Close())

	s = open(t, dir, m)
	again, err := s.AssignPorts("a", of("main", web...), pool(20000, 20004, free), func(*state.Member) {})
	require.NoError(t, err)
	require.Equal(t, a, again)
	_, err = s.AssignPorts("c", of("main", web...), pool(20000, 20004, free), func(*state.Member) {})
	require.True(t, fault.Is(err, fault.Unavailable))
	require.NoError(t, s.Retire("a", nil, noon))
	c, err := s.AssignPorts("c", of("main", web...), pool(20000, 20004, free), func(*state.Member) {})
	require.NoError(t, err)
	require.Equal(t, []uint16{20004, 20000}, []uint16{c[0].Host, c[1].Host}, "what the retired member had is free again")
	free = func(p uint16) bool { return p != 20000 }
	c, err = s.AssignPorts("c", of("main", web...), pool(20000, 20004, free), func(*state.Member) {})
	require.NoError(t, err)
	require.Equal(t, []uint16{20004, 20001}, []uint16{c[0].Host, c[1].Host}, "another program has taken one meanwhile")
}

// A browser tab or a tunnel of the tenant that has gone must not reach the next one, also after a restart of the agent.
func TestAPortThatWasGivenBackIsGivenAgainAfterAllOthers(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	web := []*protocol.Port{{Name: "http", ContainerPort: 8080, Protocol: "http"}}
	assign := func(member string) uint16 {
		ports, err := s.AssignPorts(member, of("main", web...), pool(20000, 20003, anyPort), func(*state.Member) {})
		require.NoError(t, err)
		return ports[0].Host
	}
	require.EqualValues(t, 20000, assign("stays"))
	var given []uint16
	for i := range 5 {
		member := fmt.Sprintf("m%d", i)
		given = append(given, assign(member))
		require.NoError(t, s.Retire(member, nil, noon))
		require.NoError(t, s.Close())
		s = open(t, dir, m)
	}
	require.Equal(t, []uint16{20001, 20002, 20003, 20001, 20002}, given)
}

// Of a member that runs, a store that was lost does not know the ports any more: it keeps those that are published.
func TestAMemberOfALostStoreKeepsItsPublishedPorts(t *testing.T) {
	s := open(t, t.TempDir(), newMesh(t))
	web := []*protocol.Port{{Name: "http", ContainerPort: 8080, Protocol: "http"}}
	lost := pool(20000, 20003, anyPort)
	assign := func(published uint16) uint16 {
		lost.Published = func(service string, container uint16) uint16 {
			require.Equal(t, "main", service)
			require.EqualValues(t, 8080, container)
			return published
		}
		ports, err := s.AssignPorts("m", of("main", web...), lost, func(*state.Member) {})
		require.NoError(t, err)
		return ports[0].Host
	}
	require.EqualValues(t, 20002, assign(20002))
	require.EqualValues(t, 20002, assign(20003), "what the store knows counts")
}

func TestRetiringClosesUsageWithAFinalRecordAndAProof(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	v, parts := m.desired(1, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.AcceptLeases(m.leases(s.Incarnation(), lease("a", 1))))
	use(t, s, "a", "r1", 45)
	sample(t, s, noon.Add(50*time.Second), meter.Run{
		RunID: "r1", MemberID: "a", StartedAt: noon,
		ExitedAt: noon.Add(47 * time.Second),
	})
	require.True(t, s.Measured("r1"))
	require.NoError(t, s.CloseRun("r1"))
	v, parts = m.desired(2)
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.Retire("a", protocol.RemovalKinds(), noon.Add(time.Minute)))

	seconds, last := sealedSeconds(t, s, m)
	require.InDelta(t, 47, seconds, 0)
	require.True(t, last.GetFinal())
	proof := s.Members()["a"].Removal
	require.True(t, proof.Complete())
	require.Equal(t, last.GetSequence(), proof.GetLastUsageSequence())
	require.Equal(t, s.Incarnation(), proof.GetIncarnation())
	require.Empty(t, s.Leases())
	require.NoError(t, s.AcknowledgeRemovals([]string{"a", "unknown"}))
	require.True(t, s.Members()["a"].Reported)
}

func TestWhatAMemberHasUsedCountsWhenARestoredHubNamesItAgain(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	v, parts := m.desired(1, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	use(t, s, "a", "r1", 45)
	sample(t, s, noon.Add(50*time.Second), meter.Run{
		RunID: "r1", MemberID: "a", StartedAt: noon,
		ExitedAt: noon.Add(47 * time.Second),
	})
	used := s.Consumed("a")
	require.Positive(t, used[protocol.MeterSessionSeconds])
	require.NoError(t, s.CloseRun("r1"))
	v, parts = m.desired(2)
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.Retire("a", protocol.RemovalKinds(), noon.Add(time.Minute)))
	require.NoError(t, s.AcknowledgeRemovals([]string{"a"}))
	require.NoError(t, s.Close())
	s = open(t, dir, m)
	v, parts = m.desired(3, workload("a", 2))
	require.NoError(t, s.AcceptState(v, parts))
	require.Nil(t, s.Members()["a"].Removal)
	require.Equal(t, used, s.Consumed("a"), "the cap of a lease counts from the member's beginning")
}

// Between the decision to retire and its execution a state may have come that names the member. Were its last record
// sealed then, what it uses from now on would be written off.
func TestLaw05AMemberThatTheStateNamesIsNotRetired(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	v, parts := m.desired(1, workload("a", 1))
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.AcceptLeases(m.leases(s.Incarnation(), lease("a", 1))))
	require.NoError(t, s.Retire("a", protocol.RemovalKinds(), noon))
	require.Nil(t, s.Members()["a"].Removal)
	require.Contains(t, s.Leases(), "a")
	require.Zero(t, s.Spool().LastSegment, "nothing is final")
	v, parts = m.desired(2)
	require.NoError(t, s.AcceptState(v, parts))
	require.NoError(t, s.Retire("a", protocol.RemovalKinds(), noon))
	require.True(t, s.Members()["a"].Removal.Complete())
}

// Logs, commands and copies are of the first service unless another one is named.
func TestTheNewestRunIsOfTheNamedService(t *testing.T) {
	m := newMesh(t)
	s := open(t, t.TempDir(), m)
	w := workload("a", 1)
	w.Services = []*protocol.Service{{Name: "server"}, {Name: "db"}}
	require.NoError(t, s.AcceptState(m.desired(1, w)))
	for i, service := range []string{"server", "db", "server", "db"} {
		require.NoError(t, s.OpenRun(state.Run{
			ID: fmt.Sprint("a.", i), MemberID: "a", Service: service, OpenedAt: noon.Add(time.Duration(i) * time.Second),
		}))
	}
	for service, want := range map[string]string{"": "a.2", "server": "a.2", "db": "a.3"} {
		run, err := s.NewestRun("a", service)
		require.NoError(t, err)
		require.Equal(t, want, run.ID, service)
	}
	_, err := s.NewestRun("a", "cache")
	require.ErrorContains(t, err, `has no service "cache"; it has server, db`)
	require.True(t, fault.Is(err, fault.NotFound))
	_, err = s.NewestRun("gone", "server")
	require.ErrorContains(t, err, "no container", "of a member without services it cannot say which there are")
	require.True(t, fault.Is(err, fault.NotFound))
}

// A kill between two writes of an exit would leave it counted and not recorded, so that the next start counts it again.
func TestAnExitIsCountedAndRecordedInOneTransaction(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s := open(t, dir, m)
	require.NoError(t, s.OpenRun(state.Run{ID: "a.1", MemberID: "a", OpenedAt: noon}))
	require.NoError(t, s.RecordExit("a", "a.1",
		func(member *state.Member, run state.Run) {
			require.Equal(t, noon, run.OpenedAt)
			member.Restarts++
		},
		func(run *state.Run) { run.ExitRecorded = true }))
	require.EqualValues(t, 1, s.Members()["a"].Restarts)
	require.True(t, s.Runs()["a.1"].ExitRecorded)
	require.NoError(t, s.Close())

	db, err := badger.Open(badger.DefaultOptions(dir).WithLogger(nil))
	require.NoError(t, err)
	defer func() { require.NoError(t, db.Close()) }()
	require.NoError(t, db.View(func(tx *badger.Txn) error {
		member, err := tx.Get([]byte("member/a"))
		require.NoError(t, err)
		run, err := tx.Get([]byte("run/a.1"))
		require.NoError(t, err)
		require.Equal(t, member.Version(), run.Version())
		return nil
	}))
}

// However many members were removed, a proof stays until the hub has it.
func TestLaw09OnlyProofsThatTheHubHasAreForgotten(t *testing.T) {
	m, dir := newMesh(t), t.TempDir()
	s, err := state.Open(dir, state.Options{MinFreeBytes: 1, MaxTombstones: 2})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	require.NoError(t, m.resume(s))
	require.NoError(t, s.Identify(nodeID, protocol.NewEd25519Signer(m.node)))
	var reported []string
	for n := range 6 {
		id := fmt.Sprint("m", n)
		require.NoError(t, s.UpdateMember(id, func(*state.Member) {}))
		require.NoError(t, s.Retire(id, protocol.RemovalKinds(), noon.Add(time.Duration(n)*time.Minute)))
		if n > 0 {
			reported = append(reported, id)
		}
	}
	for _, id := range reported {
		require.NoError(t, s.AcknowledgeRemovals([]string{id}))
	}
	require.NoError(t, s.AcknowledgeRemovals([]string{"m0"}))
	var left []string
	for id := range s.Members() {
		left = append(left, id)
	}
	slices.Sort(left)
	require.Equal(t, []string{"m0", "m4", "m5"}, left)
}
