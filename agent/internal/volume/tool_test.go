package volume_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/agent/internal/volume"
)

// A program that an agent runs on an image goes on after a kill of the agent. The next agent neither mounts nor changes
// nor copies the image before the program has ended.
func TestAnImageWaitsForTheProgramOfAKilledAgent(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	images, err := filepath.Glob(filepath.Join(f.cfg.Dir, "m1.data", "*.img"))
	require.NoError(t, err)
	require.Len(t, images, 1)

	// The program has the lock by the file that it inherits.
	program, err := os.Open(images[0])
	require.NoError(t, err)
	defer func() { _ = program.Close() }()
	require.NoError(t, unix.Flock(int(program.Fd()), unix.LOCK_EX))
	larger := use(1)
	larger.SizeBytes *= 2
	for name, u := range map[string]volume.Use{"mount": use(1), "grow": larger, "snapshot": upgrade(2)} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		_, err := f.v.Prepare(ctx, u)
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded, name)
		require.NotContains(t, backingFiles(t), images[0], name)
	}
	require.NoError(t, program.Close())
	f.requireContent(f.prepare(larger), "first")
}

// The programs inherit the locked image: their end, and not the agent's, unlocks it.
func TestAProgramInheritsTheLockOfItsImage(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"mkfs.ext4", "e2fsck", "resize2fs"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(`#!/bin/sh
for image; do :; done
[ "$(readlink /proc/$$/fd/3)" = "$image" ] || { echo "descriptor 3 is not $image"; exit 9; }
flock --nonblock "$image" true && { echo "$image is not locked"; exit 9; }
case "$(readlink /proc/$$/fd/1)" in pipe:*) echo "its output is a pipe of the agent"; exit 9;; esac
echo `+name+` >> `+dir+`/ran
PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec `+name+` "$@"
`), 0o700))
	}
	t.Setenv("PATH", dir+string(filepath.ListSeparator)+os.Getenv("PATH"))
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	larger := use(1)
	larger.SizeBytes *= 2
	f.requireContent(f.prepare(larger), "first")
	ran, err := os.ReadFile(filepath.Join(dir, "ran"))
	require.NoError(t, err)
	require.Equal(t, "mkfs.ext4\ne2fsck\nresize2fs\n", string(ran))
}

// A stop of the agent leaves the program that enlarges a volume alone: cut off, it would leave a damaged file system.
func TestAStopOfTheAgentDoesNotCutAProgramOff(t *testing.T) {
	f := newFixture(t)
	f.write(f.prepare(use(1)), "first")
	require.NoError(t, f.v.Detach(t.Context(), "m1"))
	dir, before := t.TempDir(), os.Getenv("PATH")
	is := func(name string) bool {
		_, err := os.Stat(filepath.Join(dir, name))
		return err == nil
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "resize2fs"), []byte(`#!/bin/sh
PATH=/usr/sbin:/usr/bin:/sbin:/bin
cd `+dir+`
touch begun
until [ -e go-on ]; do sleep 0.02; done
resize2fs "$@" && touch done
`), 0o700))
	t.Setenv("PATH", dir+string(filepath.ListSeparator)+before)
	larger := use(1)
	larger.SizeBytes *= 2
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() {
		_, err := f.v.Prepare(ctx, larger)
		stopped <- err
	}()
	require.Eventually(t, func() bool { return is("begun") }, time.Minute, 10*time.Millisecond)
	stop()
	require.ErrorIs(t, <-stopped, context.Canceled)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go-on"), nil, 0o600))
	require.Eventually(t, func() bool { return is("done") }, time.Minute, 10*time.Millisecond)
	t.Setenv("PATH", before)
	f.requireContent(f.prepare(larger), "first")
}

// An action on a volume, like its copy, may take hours. It delays neither the end nor the removal of another member.
func TestLaw13AVolumeDelaysNoOtherMember(t *testing.T) {
	f := newFixture(t)
	f.prepare(use(1))
	other := use(1)
	other.MemberID = "m2"
	f.prepare(other)
	unlock, err := f.v.Lock(t.Context(), "m1.data")
	require.NoError(t, err)
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // for the failure
	defer cancel()
	require.NoError(t, f.v.Detach(ctx, "m2"))
	require.NoError(t, f.v.RemoveMember(ctx, "m2"))
}
