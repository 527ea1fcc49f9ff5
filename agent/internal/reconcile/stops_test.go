package reconcile_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/protocol"
)

// A tenant has many containers that take as long as they may to end. What is due for another member is done meanwhile.
func TestLaw13ContainersThatTakeTheirGraceDelayNoOtherMember(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, 1)
		defer func() { w.kill() }()
		w.script.change(func(s *script) { s.takes["stop"] = 10 * time.Minute })
		run := func(member string) string {
			id := member + ".1"
			w.machine.containers[id] = &box{spec: &protocol.Service{}, Container: runtime.Container{
				ID: id, MemberID: member, Service: "app", State: runtime.StateRunning, StartedAt: w.rtc(),
			}}
			return id
		}
		w.machine.mu.Lock()
		for n := range 100 {
			run(fmt.Sprintf("slow%03d", n))
		}
		w.machine.mu.Unlock()
		v, parts := w.hub.desired()
		require.NoError(t, w.store.AcceptState(v, parts))
		time.Sleep(time.Minute)
		synctest.Wait()

		w.machine.mu.Lock()
		other := run("other")
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
