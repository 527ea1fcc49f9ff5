package agent_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

// pair is a workload of two services, each with a volume.
func pair(revision uint64, apiVolume, workerVolume string) agent.Workload {
	service := func(name, volume string) agent.Service {
		return agent.Service{
			Name: name, Images: []string{"org/acme/shop/" + name + "@sha256:1"}, SpecDigest: fmt.Sprint(name, revision),
			Spec: &protocol.Service{Name: name, Volumes: []*protocol.VolumeMount{{Name: volume}}},
		}
	}
	return agent.Workload{
		MemberID: "web", InstanceID: "i-web", Revision: revision, ReadinessTimeout: time.Minute,
		Services: []agent.Service{service("api", apiVolume), service("worker", workerVolume)},
	}
}

// In an upgrade one service has ended, and the other takes its grace to write what it still has. The new version waits
// where they share a volume: the snapshot before the upgrade has all that the old one has written.
func TestNoVersionHasAVolumeBesideTheOneBefore(t *testing.T) {
	started := func(w agent.Workload, containers ...agent.Container) (names []string) {
		o := agent.Observed{
			Members: map[string]agent.Member{"web": member()}, Containers: containers, Images: map[string]bool{},
			Busy: map[string]agent.Work{},
		}
		for _, s := range w.Services {
			o.Images[s.Images[0]] = true
			o.Networks = append(o.Networks, agent.Network{MemberID: "web", Service: s.Name, Ready: true})
		}
		for _, c := range containers {
			o.Busy["web"] = agent.Work{Services: map[string]bool{c.Service: true}}
		}
		for _, a := range agent.Diff(desired(w), week("web"), o, noon) {
			if start, is := a.(agent.StartContainer); is {
				names = append(names, start.Service.Name)
			}
		}
		return names
	}
	upgraded := func(apiVolume, workerVolume string) (w, back agent.Workload) {
		w, back = pair(3, apiVolume, workerVolume), pair(2, apiVolume, workerVolume)
		w.Fallback = &back
		return w, back
	}
	w, back := upgraded("data", "data")
	require.Empty(t, started(w, of(back, "worker")))
	require.Equal(t, []string{"api", "worker"}, started(w), "once nothing of the version before runs")
	stranger := changed(of(back, "worker"), func(c *agent.Container) { c.Service = "stranger" })
	require.Empty(t, started(w, stranger), "nobody knows what a service had that no version has any more")

	w, back = upgraded("data", "queue")
	require.Equal(t, []string{"api"}, started(w, of(back, "worker")), "they share nothing")
	w, back = upgraded("data", "data")
	back.Services[1].SpecDigest = w.Services[1].SpecDigest
	require.Equal(t, []string{"api"}, started(w, of(back, "worker")), "what is as before goes on beside it")
}

// Of two services that share a volume with snapshots an upgrade changes one. The other is replaced as well, and again
// on the way back: no volume is restored below a container.
func TestServicesOfAVolumeWithSnapshotsAreReplacedTogether(t *testing.T) {
	shared := func(revision uint64) agent.Workload {
		w := pair(revision, "data", "data")
		for i := range w.Services {
			w.Services[i].Spec.Volumes[0].SnapshotOnUpgrade = true
		}
		w.Services[1].SpecDigest = "worker"
		return w
	}
	keeps := func(w agent.Workload, c agent.Container) bool {
		return w.Keeps(w.Services[1], []agent.Container{c})
	}
	back, w, again := shared(2), shared(3), shared(4)
	w.Fallback = &back
	again.RollsBack = true
	require.False(t, keeps(w, of(back, "worker")), "upgrade")
	require.False(t, keeps(back, of(w, "worker")), "fallback")
	require.False(t, keeps(again, of(w, "worker")), "rollback by the tenant")
	require.True(t, keeps(w, of(w, "worker")))

	w.Services[0].SpecDigest = back.Services[0].SpecDigest
	require.True(t, keeps(w, of(back, "worker")), "an upgrade of other services leaves both alone")
	w.Services[0].SpecDigest, w.Services[0].Spec.Volumes[0].Name = "api3", "other"
	require.True(t, keeps(w, of(back, "worker")), "they share nothing")
}
