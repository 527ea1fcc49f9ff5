package reconcile_test

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/internal/reconcile"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/protocol"
)

// recorder is a runtime that remembers which containers it was to make.
type recorder struct {
	*runtime.Runtime
	mu    sync.Mutex
	specs []runtime.Spec
}

func (r *recorder) Prepare(ctx context.Context, spec runtime.Spec) (*runtime.Pending, error) {
	r.mu.Lock()
	r.specs = append(r.specs, spec)
	r.mu.Unlock()
	return r.Runtime.Prepare(ctx, spec)
}

// revisions are those of the member of which a container was to be made, in order.
func (r *recorder) revisions(memberID string) (all []uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.specs {
		if s.MemberID == memberID {
			all = append(all, s.Revision)
		}
	}
	return all
}

// recording makes the fixture's runtime a recorder.
func (f *fixture) recording() *recorder {
	f.t.Helper()
	f.stop()
	r := &recorder{}
	f.wrapRuntime = func(rt *runtime.Runtime) reconcile.Containers {
		r.Runtime = rt
		return r
	}
	f.start()
	return r
}

// neverReady is the next revision of a workload, which fails.
func (f *fixture) neverReady(w, fallback *protocol.Workload) *protocol.Workload {
	f.t.Helper()
	f.hub.readyWithin = cmp.Or(f.hub.readyWithin, "2")
	next := f.hub.workload(`{"ready_after_millis":3600000}`)
	next.Id, next.InstanceId, next.Revision, next.Fallback = w.GetId(), w.GetInstanceId(), 2, fallback
	return next
}

func TestLaw01AFallbackThatNobodySignedIsNotRun(t *testing.T) {
	f := newFixture(t)
	prepared := f.recording()
	forge := map[string]func(*protocol.Workload){
		"as it was signed": func(*protocol.Workload) {},
		"another command": func(w *protocol.Workload) {
			w.Services[0].Command = []string{"/app", "--mine-bitcoin"}
		},
		"another's signature":   func(w *protocol.Workload) { w.Manifest.Signatures[0].Signature[0] ^= 1 },
		"another org":           func(w *protocol.Workload) { w.OrgSlug = "other" },
		"no earlier a revision": func(w *protocol.Workload) { w.Revision = 2 },
	}
	var first, second []*protocol.Workload
	names := map[string]string{}
	for name := range forge {
		w := f.hub.workload(`{}`)
		first, names[w.GetId()] = append(first, w), name
	}
	f.push(first...)
	for _, w := range first {
		f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
		back := proto.CloneOf(w)
		forge[names[w.GetId()]](back)
		second = append(second, f.neverReady(w, back))
	}
	f.push(second...)
	for _, w := range second {
		if names[w.GetId()] == "as it was signed" {
			f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
				return s.GetFallbackFromRevision() == 2 && s.GetStatus() == protocol.WorkloadStatus_READY
			})
			require.Equal(t, []uint64{1, 2, 1}, prepared.revisions(w.GetId()))
			continue
		}
		s := f.untilStatus(w.GetId(), protocol.WorkloadStatus_FAILED)
		require.Equal(t, protocol.WorkloadStatus_READINESS_TIMEOUT, s.GetReason(), names[w.GetId()])
		require.Zero(t, s.GetFallbackFromRevision())
	}
	f.restart() // the decisions are made again from what is stored
	for _, w := range second {
		if names[w.GetId()] == "as it was signed" {
			continue
		}
		f.untilStatus(w.GetId(), protocol.WorkloadStatus_FAILED)
		made := prepared.revisions(w.GetId())
		require.EqualValues(t, 1, made[0])
		require.NotContains(t, made[1:], uint64(1), names[w.GetId()])
		require.Zero(t, f.store.Members()[w.GetId()].FellBackFrom)
	}
}

// Where space is short, the image of a fallback stays: a node falls back while the registry is away.
func TestAFallbackFindsItsImageWithoutTheRegistry(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	f.hub.image = f.hub.push("apps/hello/spare", "/app")
	spare, err := runtime.ParseImage(f.hub.image)
	require.NoError(t, err)
	other := f.hub.workload(`{}`)
	f.push(w, other)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_READY)

	f.hub.image, f.hub.readyWithin = f.hub.push("apps/hello/next", "/app"), "6"
	next := f.neverReady(w, w)
	f.push(next)
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetRevision() == 2 && s.GetStatus() == protocol.WorkloadStatus_STARTING && s.GetStartedAt() != nil
	})
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_REMOVED)
	f.hub.registryDown.Store(true)
	f.stop()
	f.rtCfg.MaxImageStoreBytes = 1
	f.start()
	require.Eventually(t, func() bool {
		there, err := f.rt.HasImage(f.ctx(), spare)
		return err == nil && !there
	}, time.Minute, 10*time.Millisecond, "what nothing uses is removed")
	s := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetStatus() == protocol.WorkloadStatus_READY || s.GetReason() == protocol.WorkloadStatus_IMAGE_PULL_FAILED
	})
	require.Equal(t, protocol.WorkloadStatus_READY, s.GetStatus(), s.GetDetail())
	require.EqualValues(t, 2, s.GetFallbackFromRevision())
}

// A reboot during an upgrade whose image only the hub can give: the version before starts again.
func TestLaw03AColdBootWithoutAHubStartsTheFallbackOfAnUpgradeWithoutItsImage(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	f.hub.image = f.hub.push("apps/hello/next", "/app")
	next := f.hub.workload(`{}`)
	next.Id, next.InstanceId, next.Revision, next.Fallback = w.GetId(), w.GetInstanceId(), 2, w
	f.hub.away.Store(true)
	f.push(next)
	f.stop()
	f.coldBoot(w.GetId())
	f.start()
	require.Eventually(t, func() bool {
		all := f.containersOf(w.GetId())
		return len(all) == 1 && all[0].Revision == 1 && !f.store.Runs()[all[0].ID].ReadyAt.IsZero()
	}, time.Minute, 10*time.Millisecond)

	f.hub.away.Store(false)
	s := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.EqualValues(t, 2, s.GetRevision(), "the upgrade follows")
	require.EqualValues(t, 2, f.container(w.GetId()).Revision)
}

func TestLaw15AFallbackAgainstTheOwnersPolicyIsNotRun(t *testing.T) {
	f := newFixture(t)
	prepared := f.recording()
	const mebibyte = 1 << 20
	w := f.hub.workload(`{}`)
	w.Services[0].Resources.MemoryBytes = 256 * mebibyte
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	f.hub.readyWithin = "6" // the owner decides before
	next := f.neverReady(w, w)
	f.push(next)
	f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetRevision() == 2 && s.GetStatus() == protocol.WorkloadStatus_STARTING && s.GetStartedAt() != nil
	})
	f.owner.Store(&policy.Policy{Largest: policy.Size{MemoryMB: 100}})
	s := f.untilStatus(w.GetId(), protocol.WorkloadStatus_FAILED)
	require.Equal(t, protocol.WorkloadStatus_OWNER_REFUSED, s.GetReason())
	require.Contains(t, s.GetDetail(), "at most 100 MB")
	require.NotNil(t, s.GetOwnerRefusal(), "which the node signs")
	require.EqualValues(t, 2, s.GetFallbackFromRevision(), "the node has fallen back, to what the owner refuses")
	require.Eventually(t, func() bool { return len(f.containersOf(w.GetId())) == 0 }, time.Minute, 10*time.Millisecond)
	require.False(t, slices.Contains(prepared.revisions(w.GetId())[1:], 1), "no container of the fallback was made")
	f.owner.Store(&policy.Policy{})
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, uint64(1), prepared.revisions(w.GetId())[2], "which runs once the owner admits it")
}
