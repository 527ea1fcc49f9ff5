package accelerator

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/protocol"
)

// withDaemon is as an agent finds the MPS daemon of a GPU that an earlier one has started.
func withDaemon(t *testing.T) (m *mps, at string, gpu grant) {
	t.Helper()
	m = &mps{dir: t.TempDir()}
	at = filepath.Join(m.dir, "GPU-a", "acme")
	require.NoError(t, os.MkdirAll(at, 0o700))
	daemon, err := os.Create(filepath.Join(at, "lock"))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, daemon.Close()) })
	require.NoError(t, unix.Flock(int(daemon.Fd()), unix.LOCK_EX))
	return m, at, grant{accelerator: &protocol.Accelerator{Id: "GPU-a"}, sharing: protocol.SharingMPS}
}

// A kill of the agent while a daemon starts leaves one that does not limit its clients yet.
func TestNoContainerReachesAnMPSDaemonThatIsNotReady(t *testing.T) {
	m, at, gpu := withDaemon(t)
	soon, cancel := context.WithTimeout(t.Context(), 4*mpsPoll)
	defer cancel()
	_, err := m.give(soon, gpu, "acme", false, 1)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, os.WriteFile(filepath.Join(at, "ready"), nil, 0o600))
	_, err = m.give(t.Context(), gpu, "acme", false, 1)
	require.NoError(t, err)
}

// A kill of the agent right after it has started a daemon, before it has noted which process that is.
func TestAnMPSDaemonThatNobodyHasNotedIsEnded(t *testing.T) {
	skip.Root(t, "mounts")
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	text := "#!/bin/sh\ntouch \"$5/ready\"\nwhile :; do sleep 0.1; done\n"
	require.NoError(t, os.WriteFile(program, []byte(text), 0o700))
	m := &mps{dir: filepath.Join(dir, "mps"), program: program, root: "/", ended: func() {}}
	gpu := grant{accelerator: &protocol.Accelerator{Id: "GPU-a"}, sharing: protocol.SharingMPS}
	given, err := m.give(t.Context(), gpu, "acme", false, 1)
	require.NoError(t, err)
	at := filepath.Dir(given.PipeDir)
	require.NoError(t, os.Truncate(filepath.Join(at, "lock"), 0))
	lock, err := os.Open(filepath.Join(at, "lock"))
	require.NoError(t, err)
	defer func() { require.NoError(t, lock.Close()) }()
	require.NoError(t, m.stop(t.Context(), "GPU-a"))
	require.NoError(t, unix.Flock(int(lock.Fd()), unix.LOCK_SH|unix.LOCK_NB), "it has ended")
	require.NoDirExists(t, at)
}

// The container that was just given it is not listed yet.
func TestAnMPSDaemonThatIsGivenAgainIsNotIdle(t *testing.T) {
	m, at, gpu := withDaemon(t)
	require.NoError(t, os.WriteFile(filepath.Join(at, "ready"), nil, 0o600))
	_, err := m.give(t.Context(), gpu, "acme", false, 1)
	require.NoError(t, err)
	require.NoError(t, m.stopIdle(t.Context(), nil, time.Now(), time.Hour))
	require.DirExists(t, at)
	require.NoError(t, m.stopIdle(t.Context(), nil, time.Now().Add(2*time.Hour), time.Hour))
	require.NoDirExists(t, at)
}

// The first pass of an agent may be over before the driver has named the GPU, and the owner may share it otherwise now.
func TestLaw03AContainerKeepsItsMPSDaemonWhateverTheDriverNames(t *testing.T) {
	m, at, _ := withDaemon(t)
	i := New(Config{Root: t.TempDir(), MPSDir: m.dir})
	i.mps.release = nil
	i.SetUsed([]string{protocol.SliceID("GPU-a", protocol.SharingMPS, 4, 0)})
	require.NoError(t, i.mps.stopIdle(t.Context(), i.ladder.used, i.ladder.usedAt, time.Minute))
	require.DirExists(t, at)
	i.SetUsed([]string{protocol.SliceID("GPU-b", protocol.SharingMPS, 4, 0), "GPU-c"})
	require.NoError(t, i.mps.stopIdle(t.Context(), i.ladder.used, i.ladder.usedAt, time.Minute))
	require.NoDirExists(t, at)
}

// An agent that has just started does not know yet what the containers have.
func TestAnAgentThatKnowsNoContainerYetEndsNoMPSDaemon(t *testing.T) {
	m, at, _ := withDaemon(t)
	root := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(root, "dev"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(root, "dev/kmsg"),
		[]byte("3,1,1,-;NVRM: Xid (PCI:0000:1b:00): 95, pid=1, Uncontained: LTC\n"), 0o600))
	i := New(Config{Root: root, MPSDir: m.dir, MPSIdle: time.Nanosecond, Interval: time.Hour})
	for _, s := range i.sources {
		s.scannedAt = time.Now()
		close(s.scanned)
	}
	i.sources[0].found = []*protocol.Accelerator{{Id: "GPU-b", PciAddress: "0000:1b:00.0"}}
	changed := i.Subscribe()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		i.repair(ctx)
	}()
	<-changed // a round is under way, which the end of ctx does not cut short
	cancel()
	<-ended
	require.DirExists(t, at)
}

// The process number in a lock that is not held may be another program's by now.
func TestTheProcessOfAnEndedMPSDaemonIsNotKilled(t *testing.T) {
	m := &mps{dir: t.TempDir()}
	at := filepath.Join(m.dir, "GPU-a", "acme")
	require.NoError(t, os.MkdirAll(at, 0o700))
	stranger := exec.Command("sleep", "3600")
	require.NoError(t, stranger.Start())
	require.NoError(t, os.WriteFile(filepath.Join(at, "lock"), []byte(strconv.Itoa(stranger.Process.Pid)), 0o600))
	require.NoError(t, m.stop(t.Context(), "GPU-a"))
	require.NoDirExists(t, at)
	require.NoError(t, stranger.Process.Kill())
	_ = stranger.Wait()
	require.Equal(t, unix.SIGKILL, stranger.ProcessState.Sys().(syscall.WaitStatus).Signal(), "by the test alone")
}
