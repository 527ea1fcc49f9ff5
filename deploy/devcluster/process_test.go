package devcluster_test

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
)

// holderEnv makes this program hold a lock on the named file while its first thread has ended.
const holderEnv = "CLUSTER_TEST_HOLDER"

// counterEnv makes this program count in the named file, by so many threads: more than there are processors, so that
// the one that gets a signal has to wait.
const (
	counterEnv = "CLUSTER_TEST_COUNTER"
	counters   = 32
)

// The first goroutine stays on the process's first thread only if an init function asks for it.
//
//nolint:gochecknoinits // nothing later is sure to run on the first thread
func init() {
	if os.Getenv(holderEnv) != "" {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	if name := os.Getenv(counterEnv); name != "" {
		countForever(name)
	}
	if name := os.Getenv(holderEnv); name != "" {
		// The first thread ends last of all: it takes its share of the scheduler along, and with it whatever waits there to
		// run.
		signal.Ignore(syscall.SIGTERM)
		locked := make(chan struct{})
		go holdLock(name, locked)
		<-locked
		_, _, _ = syscall.RawSyscall(syscall.SYS_EXIT, 0, 0, 0)
	}
	os.Exit(m.Run())
}

// countForever adds to a shared counter by several threads.
func countForever(name string) {
	count, err := shareCounter(name)
	if err != nil {
		os.Exit(1)
	}
	for range counters {
		go func() {
			for {
				count.Add(1)
			}
		}()
	}
	select {}
}

// shareCounter maps the counter in a file of eight bytes.
func shareCounter(name string) (*atomic.Int64, error) {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	data, err := unix.Mmap(int(f.Fd()), 0, 8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*atomic.Int64)(unsafe.Pointer(&data[0])), nil
}

func holdLock(name string, locked chan<- struct{}) {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil || unix.Flock(int(f.Fd()), unix.LOCK_EX) != nil {
		os.Exit(1)
	}
	fmt.Println("locked")
	close(locked)
	select {}
}

// A process whose first thread has ended appears as a zombie while its other threads still hold its files.
func TestAProcessHasEndedOnlyWhenItsLocksAreFree(t *testing.T) {
	name := filepath.Join(t.TempDir(), "lock")
	require.NoError(t, os.WriteFile(name, nil, 0o600))
	holder := exec.Command("/proc/self/exe")
	holder.Env = append(os.Environ(), holderEnv+"="+name)
	out, err := holder.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, holder.Start())
	t.Cleanup(func() { _ = holder.Process.Kill(); _ = holder.Wait() })
	_, err = bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", holder.Process.Pid))
		return err == nil && bytes.Contains(stat, []byte(") Z "))
	}, time.Minute, time.Millisecond, "the first thread ends")
	ticks, err := devcluster.StartTicks(holder.Process.Pid)
	require.NoError(t, err)

	require.NoError(t, devcluster.EndProcess(holder.Process.Pid, ticks, 100*time.Millisecond))

	f, err := os.OpenFile(name, os.O_RDWR, 0)
	require.NoError(t, err)
	defer func() { _ = f.Close() }()
	require.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB))
}

// A signal to a process interrupts one thread of it at first; the others go on for a while.
func TestAPausedProcessHasNoThreadThatRuns(t *testing.T) {
	name := filepath.Join(t.TempDir(), "counter")
	require.NoError(t, os.WriteFile(name, make([]byte, 8), 0o600))
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), counterEnv+"="+name, fmt.Sprintf("GOMAXPROCS=%d", counters))
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	count, err := shareCounter(name)
	require.NoError(t, err)
	for range 5 {
		begin := count.Load()
		require.Eventually(t, func() bool { return count.Load() != begin }, time.Minute, time.Millisecond)
		resume, err := devcluster.Pause(cmd.Process.Pid)
		require.NoError(t, err)
		paused := count.Load()
		for range 1_000_000 {
			if now := count.Load(); now != paused {
				require.Equal(t, paused, now)
			}
		}
		resume()
	}
	_, err = devcluster.Pause(1 << 30)
	require.ErrorIs(t, err, unix.ESRCH)
}
