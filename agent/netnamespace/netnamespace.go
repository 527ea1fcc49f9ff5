// Package netnamespace works in network namespaces: it runs a function inside another one, and lists what one holds.
// It creates and removes none: agent/internal/network does.
package netnamespace

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// errNotReturned: the thread could not return to its own network namespace.
var errNotReturned = errors.New("cannot return to the own network namespace")

// Run calls fn on a thread inside the namespace that is mounted at path, and then returns the thread. A thread that
// cannot return is never used again.
func Run(path string, fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := runInside(path, fn)
		if !errors.Is(err, errNotReturned) {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

func runInside(path string, fn func() error) error {
	home, err := netns.GetFromPath("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer func() { _ = home.Close() }()
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }()
	if err := netns.Set(ns); err != nil {
		return fmt.Errorf("enter network namespace: %w", err)
	}
	err = fn()
	if e := netns.Set(home); e != nil {
		return errors.Join(err, errNotReturned, e)
	}
	return err
}

// maxDumps bounds how often List asks the kernel.
const maxDumps = 100

// List repeats a listing that changed while the kernel sent it (NLM_F_DUMP_INTR, netlink(7)): other programs make links
// and addresses at any time, and a part of the answer may be missing.
func List[T any](list func() ([]T, error)) (all []T, err error) {
	for range maxDumps {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}
