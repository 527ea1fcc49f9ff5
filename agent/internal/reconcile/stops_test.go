package reconcile_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/network"
	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/protocol"
)

// A tenant has many containers that take as long as they may to end. What is due for another member is done meanwhile.
func TestLaw13ContainersThatTakeTheirGraceDelayNoOtherMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, 1)
		defer func() { w.kill() }()
		w.script.change(func(s *script) { s.takes["stop"] = 10 * time.Minute })
		w.machine.mu.Lock()
		for n := range 100 {
			w.addContainer(fmt.Sprintf("slow%03d", n))
		}
		w.machine.mu.Unlock()
		v, parts := w.hub.desired()
		require.NoError(t, w.store.AcceptState(v, parts))
		time.Sleep(time.Minute)
		synctest.Wait()

		w.machine.mu.Lock()
		other := w.addContainer("other")
		w.machine.mu.Unlock()
		w.machine.end(other, runtime.StateExited, 0)
		time.Sleep(time.Minute)
		synctest.Wait()
		w.machine.mu.Lock()
		defer w.machine.mu.Unlock()
		require.Nil(t, w.machine.containers[other])
		require.Len(t, w.machine.containers, 100, "the others take their grace")
	})
}

// addContainer has a container of a member run that the agent does not know. The caller holds the machine's mu.
func (w *twin) addContainer(member string) (id string) {
	id = member + ".1"
	w.machine.containers[id] = &box{spec: &protocol.Service{}, Container: runtime.Container{
		ID: id, MemberID: member, Service: "app", State: runtime.StateRunning, StartedAt: w.rtc(),
	}}
	return id
}

// The copies of many members' volumes may take hours. The action that is due for another member is done meanwhile.
func TestLaw13CopiesOfVolumesDelayNoOtherMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, 1)
		defer func() { w.kill() }()
		w.script.change(func(s *script) { s.takes["detach"] = 10 * time.Minute })
		w.machine.mu.Lock()
		for n := range 100 {
			w.machine.networks[network.ID(fmt.Sprintf("slow%03d", n), "app")] = true
		}
		w.machine.mu.Unlock()
		v, parts := w.hub.desired()
		require.NoError(t, w.store.AcceptState(v, parts))
		time.Sleep(time.Minute)
		synctest.Wait()

		w.machine.mu.Lock()
		require.Empty(t, w.machine.networks, "all wait for their volumes")
		other := w.addContainer("other")
		w.machine.mu.Unlock()
		w.machine.end(other, runtime.StateExited, 0)
		time.Sleep(time.Minute)
		synctest.Wait()
		w.machine.mu.Lock()
		defer w.machine.mu.Unlock()
		require.Empty(t, w.machine.containers)
	})
}

// The copies of a project's large volumes take hours. The volume of another project is made meanwhile.
func TestLaw13TheVolumesOfAProjectDelayNoOtherProject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, 1)
		defer func() { w.kill() }()
		w.script.change(func(s *script) { s.takes["apply large"] = 10 * time.Hour })
		desire := func(project string, volumes int) {
			for n := range volumes {
				w.hub.nodeVolumes = append(w.hub.nodeVolumes, &protocol.ProjectVolume{
					Id: fmt.Sprintf("%s-%d", project, n), ProjectId: project, SizeBytes: protocol.MinVolumeBytes,
				})
			}
			v, parts := w.hub.desired()
			require.NoError(t, w.store.AcceptState(v, parts))
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		desire("large", 3)
		desire("other", 1)
		made := w.loop.Report().Volumes
		require.Len(t, made, 1)
		require.Equal(t, "other-0", made[0].GetId())
	})
}

// The pulls of an org's large images take hours. The image of another org is pulled meanwhile.
func TestLaw13ThePullsOfAnOrgDelayNoOtherOrg(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, 1)
		defer func() { w.kill() }()
		var all []*protocol.Workload
		var leases []*protocol.Lease
		for _, id := range []string{"large1", "large2", "large3", "large4", "large5", "other"} {
			next := w.workload(id, nil)
			next.OrgId = strings.Trim(id, "12345")
			if next.GetOrgId() == "large" {
				w.script.change(func(s *script) { s.takes["pull apps/hello/"+id] = 10 * time.Hour })
			}
			all, leases = append(all, next), append(leases, w.hub.newLease(id, time.Hour))
		}
		v, parts := w.hub.desired(all...)
		require.NoError(t, w.store.AcceptState(v, parts))
		require.NoError(t, w.store.AcceptLeases(w.hub.leases(w.store.Incarnation(), leases...)))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		w.machine.mu.Lock()
		defer w.machine.mu.Unlock()
		require.Len(t, w.machine.images, 1)
		require.Len(t, w.machine.containers, 1)
		for _, b := range w.machine.containers {
			require.Equal(t, "other", b.MemberID)
		}
	})
}

// The agent was killed after it had stored that a container is to stop, and the container is desired again.
func TestAStopThatWasCutOffDoesNotCountForALaterExit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, 1)
		defer func() { w.kill() }()
		v, parts := w.hub.desired(w.workload("member", nil))
		require.NoError(t, w.store.AcceptState(v, parts))
		require.NoError(t, w.store.AcceptLeases(w.hub.leases(w.store.Incarnation(), w.hub.newLease("member", time.Hour))))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		runs := w.store.Runs()
		require.Len(t, runs, 1)
		for id := range runs {
			require.NoError(t, w.store.UpdateRun(id, func(r *state.Run) { r.StopRequested = true }))
		}
		w.loop.Wake()
		synctest.Wait()
		runs = w.store.Runs()
		require.Len(t, runs, 1)
		for _, r := range runs {
			require.False(t, r.StopRequested)
		}
	})
}

// openFor is a network with a connection that stays open for so long.
type openFor struct {
	reconcile.Network
	stays time.Duration
}

func (n openFor) Drain(_ context.Context, _ string, limit time.Duration) error {
	time.Sleep(min(n.stays, limit))
	return nil
}

// graceOf notes the grace of a stop.
type graceOf struct {
	reconcile.Containers
	grace *time.Duration
}

func (c graceOf) Stop(_ context.Context, _ string, grace time.Duration) error {
	*c.grace = grace
	return nil
}

// What a container's connections take of its grace is not given to it again.
func TestAContainerThatIsDrainedEndsWithinItsGrace(t *testing.T) {
	for stays, left := range map[time.Duration]time.Duration{
		0: 10 * time.Second, 3 * time.Second: 7 * time.Second, time.Hour: 5 * time.Second,
	} {
		synctest.Test(t, func(t *testing.T) {
			s, err := state.Open(t.TempDir(), state.Options{MinFreeBytes: 1})
			require.NoError(t, err)
			defer func() { require.NoError(t, s.Close()) }()
			boot := time.Now()
			source := state.Source{RTC: time.Now, SinceBoot: func() time.Duration { return time.Since(boot) }}
			var grace time.Duration
			r := reconcile.New(reconcile.Config{}, s, state.NewClock(s, source, time.Time{}), reconcile.Machine{
				Network: openFor{stays: stays}, Containers: graceOf{grace: &grace},
			}, nil)
			require.NoError(t, r.StopContainer(t.Context(), agent.StopContainer{
				MemberID: "m1", ContainerID: "m1.1", Service: "app", Grace: 10 * time.Second, Drain: true,
			}))
			require.Equal(t, left, grace)
		})
	}
}
