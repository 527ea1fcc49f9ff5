package netem

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/vishvananda/netns"
)

// Within runs open on a thread in the network namespace at path; the sockets that it opens stay there. The empty path
// is the caller's.
func Within(path string, open func() error) error {
	if path == "" {
		return open()
	}
	done := make(chan error, 1)
	go func() {
		// The thread ends with this goroutine, because it is never unlocked: no other is ever left in the wrong namespace.
		runtime.LockOSThread()
		done <- func() error {
			ns, err := netns.GetFromPath(path)
			if err != nil {
				return fmt.Errorf("open network namespace %s: %w", path, err)
			}
			if err := netns.Set(ns); err != nil {
				return errors.Join(fmt.Errorf("enter network namespace %s: %w", path, err), ns.Close())
			}
			return errors.Join(open(), ns.Close())
		}()
	}()
	return <-done
}
