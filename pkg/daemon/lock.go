package daemon

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// lockWait is how long Lock waits for a lock that is held.
	lockWait = 2 * time.Second
	lockPoll = 20 * time.Millisecond
)

// Lock locks a file against other processes until it is closed; the error of a lock that is held is unix.EWOULDBLOCK.
// It waits a moment for such a lock: a child of a killed process that was just being forked has the process's files
// open until it executes its program, which a slow disk delays.
func Lock(f *os.File) error { return lockUntil(time.After(lockWait), f) }

// AwaitLock is Lock for a lock that another process may hold for long: it waits until ctx ends.
func AwaitLock(ctx context.Context, f *os.File) error { return lockUntil(ctx.Done(), f) }

func lockUntil[T any](end <-chan T, f *os.File) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		select {
		case <-end:
			return err
		case <-time.After(lockPoll):
		}
	}
}
