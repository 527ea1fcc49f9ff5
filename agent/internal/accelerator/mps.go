package accelerator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/pkg/keylock"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// mpsStartMax bounds the start of an MPS daemon.
	mpsStartMax = 20 * time.Second
	// DefaultMPSIdle is how long a daemon without containers lives: they follow each other when an app is upgraded.
	DefaultMPSIdle = time.Minute
	// mpsStopMax bounds the wait for a daemon that was told to end.
	mpsStopMax = 5 * time.Second
	mpsPoll    = 50 * time.Millisecond
	// mpsPipeOptions bound the directory of the daemon's sockets, in which containers may write.
	mpsPipeOptions = "mode=777,size=4m,nr_inodes=1k"
	// mpsShmPercent bounds the /dev/shm of all daemons together, as a part of the machine's memory: what a container
	// leaves in one counts for no container any more once it has ended.
	mpsShmPercent = 25
)

// mps runs an MPS daemon for each GPU whose slices containers have: from the start of the first one until none has any.
// A daemon is for one org, because its containers share a file system in memory. It outlives the agent, which finds it
// again by the lock that it holds, in <dir>/<GPU>/<org>.
type mps struct {
	dir, program, root string
	// ended is called when a daemon has ended.
	ended func()
	// release lets every program use the GPU of a daemon that was killed; nil leaves that to the daemons.
	release func(ctx context.Context, gpu string) error

	// locks are by GPU; one is held while the GPU's daemon is started or ended.
	locks keylock.Map
	// givenAt is when a container last got the daemon of a GPU.
	givenAt sync.Map
	// failed has the GPUs whose daemon did not start last.
	failed sync.Map
}

// give returns what a container of an org needs to use a slice, and starts the daemon if there is none. used: a
// container that has a slice of the GPU still runs. gpus is how many the machine has.
func (m *mps) give(ctx context.Context, g grant, org string, used bool, gpus int) (*cdi.MPS, error) {
	gpu := g.accelerator.GetId()
	if m.dir == "" || !isName(gpu) || !isName(org) {
		return nil, fmt.Errorf("MPS needs the org of a container: %q", org)
	}
	unlock, err := m.locks.Lock(ctx, gpu)
	if err != nil {
		return nil, err
	}
	defer unlock()
	at := filepath.Join(m.dir, gpu, org)
	n := uint64(max(1, len(g.accelerator.GetPartitions())))
	out := &cdi.MPS{
		PipeDir: filepath.Join(at, "pipe"), ShmDir: filepath.Join(at, "shm"), ThreadPercent: 100 / n,
		MemoryMiB: g.accelerator.GetMemoryBytes() / n >> 20,
	}
	switch {
	case isHeld(at):
		// An agent that was killed while it started the daemon has not waited until it limits its clients.
		if err := awaitReady(ctx, at, nil); err != nil {
			return nil, fmt.Errorf("the MPS daemon of %s does not serve yet: %w", gpu, err)
		}
	case used:
		return nil, fmt.Errorf("the MPS daemon of %s has ended, or serves another org", gpu)
	default:
		err := errors.Join(m.stop(ctx, gpu), m.start(ctx, at, gpu, out, gpus))
		if err != nil {
			m.failed.Store(gpu, true)
			return nil, errors.Join(err, m.stop(ctx, gpu))
		}
		m.failed.Delete(gpu)
	}
	m.givenAt.Store(gpu, time.Now())
	return out, nil
}

func isName(s string) bool { return filepath.IsLocal(s) && filepath.Base(s) == s && s != "." }

// start starts the daemon of a GPU and waits until it serves.
func (m *mps) start(ctx context.Context, at, gpu string, limits *cdi.MPS, gpus int) error {
	if err := m.prepare(at, limits, gpus); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(at, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	log, err := os.Create(filepath.Join(at, "supervisor.log"))
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	//nolint:noctx // it outlives the agent
	cmd := exec.Command(m.program, "--driver-root", m.root, "mps", gpu, at,
		strconv.FormatUint(limits.ThreadPercent, 10), strconv.FormatUint(limits.MemoryMiB, 10))
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{lock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: unix.CLONE_NEWNS}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
		m.ended()
	}()
	if _, err := fmt.Fprint(lock, cmd.Process.Pid); err != nil {
		return err
	}
	if err := awaitReady(ctx, at, ended); err != nil {
		raw, _ := os.ReadFile(log.Name())
		return fmt.Errorf("the MPS daemon of %s does not start: %w: %s", gpu, err,
			bytes.TrimSpace(raw[:min(len(raw), maxErrorBytes)]))
	}
	return nil
}

// prepare makes what daemon and clients share. The daemon's servers have the users of the containers.
func (m *mps) prepare(at string, limits *cdi.MPS, gpus int) error {
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{
		{m.dir, 0o711},
		{filepath.Dir(at), 0o711},
		{at, 0o711},
		{limits.PipeDir, 0o711},
		{limits.ShmDir, 0o711},
		{filepath.Join(at, "log"), 0o777},
	} {
		if err := errors.Join(os.MkdirAll(d.path, d.mode), os.Chmod(d.path, d.mode)); err != nil {
			return err
		}
	}
	// Containers write to both. Without a file system of its own, the pipe directory would take the host's /run.
	shmOptions := fmt.Sprintf("mode=1777,size=%d%%,nr_inodes=64k", max(1, mpsShmPercent/max(1, gpus)))
	for dir, options := range map[string]string{limits.ShmDir: shmOptions, limits.PipeDir: mpsPipeOptions} {
		err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options)
		if err != nil {
			return fmt.Errorf("mount the memory that MPS shares: %w", err)
		}
	}
	return nil
}

func awaitReady(ctx context.Context, at string, ended <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(ctx, mpsStartMax)
	defer cancel()
	for {
		if _, err := os.Stat(filepath.Join(at, "ready")); err == nil {
			return nil
		}
		select {
		case <-time.After(mpsPoll):
		case <-ctx.Done():
			return ctx.Err()
		case <-ended:
			return errors.New("it has ended")
		}
	}
}

// isHeld reports whether the daemon of this directory lives.
func isHeld(at string) bool {
	lock, err := os.Open(filepath.Join(at, "lock"))
	if err != nil {
		return false
	}
	defer func() { _ = lock.Close() }()
	return errors.Is(unix.Flock(int(lock.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// lives reports whether a daemon of the GPU lives, of whichever org.
func (m *mps) lives(gpu string) bool {
	held := false
	for _, at := range m.of(gpu) {
		held = held || isHeld(at)
	}
	return held
}

// of are the directories of a GPU's daemons.
func (m *mps) of(gpu string) []string {
	found, _ := filepath.Glob(filepath.Join(m.dir, gpu, "*")) // ids have no pattern's characters
	return found
}

// stop ends the daemon of a GPU with its servers and removes what it had. As long as the GPU cannot be released, its
// directory stays, which tells the next call that there is a GPU to release.
func (m *mps) stop(ctx context.Context, gpu string) error {
	var releaseErr error
	for _, at := range m.of(gpu) {
		if pid := holder(at); pid > 1 && isHeld(at) {
			_ = unix.Kill(pid, unix.SIGTERM) // the daemon's, as it holds the lock
			awaitEnd(at)
			if isHeld(at) {
				_ = unix.Kill(-pid, unix.SIGKILL)
				awaitEnd(at)
			}
		}
		// A daemon that was not killed has released its GPU, and says so.
		if _, err := os.Stat(filepath.Join(at, "released")); err != nil && m.release != nil {
			releaseErr = m.release(ctx, gpu)
		}
		for _, name := range []string{"shm", "pipe"} {
			err := unix.Unmount(filepath.Join(at, name), unix.MNT_DETACH)
			if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("unmount the memory that MPS shared: %w", err)
			}
		}
	}
	if releaseErr != nil {
		m.givenAt.Store(gpu, time.Now()) // stopIdle tries again
		return releaseErr
	}
	m.givenAt.Delete(gpu)
	return os.RemoveAll(filepath.Join(m.dir, gpu))
}

// holder is the process that runs the daemon of this directory, as its lock says; 0 where there is none. An agent that
// was killed right after it had started the process has not written that: then the process's own arguments say it.
func holder(at string) (pid int) {
	raw, _ := os.ReadFile(filepath.Join(at, "lock"))
	if pid, _ = strconv.Atoi(strings.TrimSpace(string(raw))); pid > 1 {
		return pid
	}
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range all {
		raw, _ := os.ReadFile(file) // it may have ended
		if args := strings.Split(string(raw), "\x00"); slices.Contains(args, "mps") && slices.Contains(args, at) {
			pid, _ = strconv.Atoi(filepath.Base(filepath.Dir(file)))
		}
	}
	return pid
}

func awaitEnd(at string) {
	for range int(mpsStopMax / mpsPoll) {
		if !isHeld(at) {
			return
		}
		time.Sleep(mpsPoll)
	}
}

// stopIdle ends the daemons of GPUs that no container has had for a while; used are the others, as of usedAt. It leaves
// a GPU alone whose daemon is being started or ended.
func (m *mps) stopIdle(ctx context.Context, used map[string]bool, usedAt time.Time, idle time.Duration) error {
	var errs []error
	gpus, _ := os.ReadDir(m.dir)
	for _, gpu := range gpus {
		if id := gpu.Name(); !used[id] {
			errs = append(errs, m.stopIdleSince(ctx, usedAt.Add(-idle), id))
		}
	}
	return errors.Join(errs...)
}

func (m *mps) stopIdleSince(ctx context.Context, at time.Time, gpu string) error {
	unlock, free := m.locks.TryLock(gpu)
	if !free {
		return nil
	}
	defer unlock()
	last, _ := m.givenAt.Load(gpu)
	if given, _ := last.(time.Time); !at.After(given) {
		return nil
	}
	return m.stop(ctx, gpu)
}

// hasFailed reports whether the last start of a daemon failed.
func (m *mps) hasFailed() (failed bool) {
	m.failed.Range(func(any, any) bool {
		failed = true
		return false
	})
	return failed
}

// StopMPS ends all MPS daemons of an agent that is uninstalled, whose containers are gone.
func StopMPS(ctx context.Context, cfg Config) error {
	return New(cfg).mps.stopIdle(ctx, nil, time.Now(), 0)
}

func (g grant) hasMPS() bool { return g.sharing == protocol.SharingMPS }
