package runtime_test

import (
	"fmt"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	agentruntime "github.com/gpuaas/gpuaas/agent/internal/runtime"
)

// useUpKeys takes all keys that the kernel gives a user (kernel.keys.maxkeys), until the test ends.
func useUpKeys(t *testing.T, uid uint32) {
	t.Helper()
	full, done, ended := make(chan error), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		// Of this thread alone; keys belong to the user for the file system.
		_, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, uintptr(uid), 0, 0)
		defer func() { _, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, 0, 0, 0) }()
		var err error
		for i := 0; err == nil; i++ {
			_, err = unix.AddKey("user", fmt.Sprint(i), []byte("x"), unix.KEY_SPEC_THREAD_KEYRING)
		}
		full <- err
		<-done
		_, _ = unix.KeyctlInt(unix.KEYCTL_CLEAR, unix.KEY_SPEC_THREAD_KEYRING, 0, 0, 0)
	}()
	require.ErrorIs(t, <-full, unix.EDQUOT)
	t.Cleanup(func() {
		close(done)
		<-ended
	})
}

// The containers of a node share a range of user ids, and the kernel gives a user 200 keys: hundreds of containers
// start.
func TestContainersTakeNoKeysOfTheirSharedUser(t *testing.T) {
	f := newFixture(t)
	image := f.image()
	useUpKeys(t, agentruntime.DefaultUIDMapBase)
	_, err := f.rt.Start(t.Context(), f.spec(image, "wait"))
	require.NoError(t, err)
}
