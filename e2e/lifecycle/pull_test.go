package lifecycle_test

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/harness"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// slowLink forwards connections to the hub's API and registry. While it is slow, what the hub sends on a connection
// passes at bytesPerSecond; zero is as fast as it comes.
type slowLink struct {
	net.Listener
	hub            string
	bytesPerSecond atomic.Int64
}

func newSlowLink(t *testing.T) *slowLink {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l := &slowLink{Listener: listener, hub: harness.FreeAddress()}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go l.carry(c)
		}
	}()
	return l
}

func (l *slowLink) carry(caller net.Conn) {
	defer func() { _ = caller.Close() }()
	hub, err := net.Dial("tcp", l.hub)
	if err != nil {
		return
	}
	defer func() { _ = hub.Close() }()
	go func() {
		_, _ = io.Copy(hub, caller)
		_ = hub.Close()
	}()
	for block := make([]byte, 16<<10); ; {
		n, err := hub.Read(block)
		if rate := l.bytesPerSecond.Load(); rate > 0 {
			time.Sleep(time.Duration(n) * time.Second / time.Duration(rate))
		}
		if _, e := caller.Write(block[:n]); e != nil || err != nil {
			return
		}
	}
}

func TestAPullFromASlowRegistryShowsHowFarItIs(t *testing.T) {
	w := harness.New(t)
	w.StartContainerd()
	link := newSlowLink(t)
	c := w.HubConfig()
	c.Listen, c.AdvertiseAPI = link.hub, link.Addr().String()
	w.StartHub(c)
	w.NewTenant("acme")
	w.Agent = w.StartAgent(w.AgentConfig("node"))
	w.ShipApp()
	w.Allocate(w.Agent)
	layers, err := w.Release("1.0.0").Image.Layers()
	require.NoError(t, err)
	require.Len(t, layers, 1)
	layerBytes, err := layers[0].Size()
	require.NoError(t, err)

	// The network is slow until a few numbers of bytes were shown.
	const shown, seconds = 3, 60
	link.bytesPerSecond.Store(layerBytes / seconds)
	began := time.Now()
	i, err := client.Read[client.AppInstance](w.Operator.CreateAppInstance(w.Ctx, w.Tenant.Project.ID,
		client.AppInstanceCreate{
			AppSlug: harness.AppSlug, Version: "1.0.0", DisplayName: "slow",
			PlacementIntent: client.PlacementIntent{AllocationIds: []string{w.Allocation.ID}},
		}))
	require.NoError(t, err)
	var done []int64
	ctx, cancel := context.WithTimeout(w.Ctx, harness.ConvergenceBound)
	defer cancel()
	i, err = w.Operator.FollowInstance(ctx, w.Tenant.Project.ID, i.ID, client.AppInstanceStatusRunning,
		func(i client.AppInstance) {
			p := i.Members[0].ImagePull
			if p.Phase != client.ImagePullPhaseFetching {
				return
			}
			require.Equal(t, layerBytes, p.TotalBytes)
			if len(done) == 0 || p.DoneBytes != done[len(done)-1] {
				done = append(done, p.DoneBytes)
			}
			if len(done) == shown {
				link.bytesPerSecond.Store(0)
			}
		})
	require.NoError(t, err)
	took := time.Since(began)
	w.RequireAnswer(i)
	require.Empty(t, i.Members[0].ImagePull, "of a pull that has ended nothing is shown")

	t.Log("bytes shown", done, "of", layerBytes, "in", took)
	require.GreaterOrEqual(t, len(done), shown)
	require.LessOrEqual(t, len(done), int(took/time.Second)+2, "at most once a second, however long it takes")
	require.IsIncreasing(t, done)

	events, err := w.Tenant.Events(w.Ctx, w.Operator, i.ID)
	require.NoError(t, err)
	phases := map[string]int{}
	for _, e := range events {
		if e.Type == "apps.instance.image_pull" {
			require.Equal(t, i.Members[0].ID, e.Data.MemberID)
			phases[e.Data.Phase]++
		}
	}
	require.Equal(t, 1, phases["fetching"], "one event for a phase, not for its bytes")
	for phase, n := range phases {
		require.Equal(t, 1, n, phase)
	}
	w.Decommission(i)
}
