package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"

	"golang.org/x/sys/unix"
)

// firstOwner is the first of the host ids that own members' user namespaces. No user and no range of subordinate ids
// has a higher one (systemd's UIDS-GIDS.md).
const firstOwner = 1 << 31

// ownerOf is the host id that makes the member's user namespace. The kernel counts what a user namespace holds (inotify
// and fanotify instances and watches, message queues, pending signals, locked memory, namespaces) for the id that made
// it, too: with one id for all of them a member could use up the host root's share and its neighbours'.
func ownerOf(ip netip.Addr) uint32 {
	address := ip.As4()
	return firstOwner | binary.BigEndian.Uint32(address[:])&(firstOwner-1)
}

// asOwner runs fn with another effective user and all capabilities. Only the calling thread changes; package syscall
// would change all of them.
func asOwner(owner uint32, fn func() error) error {
	runtime.LockOSThread()
	if err := setEffectiveUser(owner); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("become user %d: %w", owner, err)
	}
	err := raiseCapabilities()
	if err == nil {
		err = fn()
	}
	// A thread that keeps another user is never used again.
	if e := setEffectiveUser(0); e != nil {
		return errors.Join(err, fmt.Errorf("become root again: %w", e))
	}
	runtime.UnlockOSThread()
	return err
}

// setEffectiveUser takes all effective capabilities from a user that is not root, and gives root all permitted ones.
func setEffectiveUser(id uint32) error {
	const unchanged = ^uintptr(0)
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, unchanged, uintptr(id), unchanged); errno != 0 {
		return errno
	}
	return nil
}

func raiseCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return fmt.Errorf("read the own capabilities: %w", err)
	}
	for i := range sets {
		sets[i].Effective = sets[i].Permitted
	}
	if err := unix.Capset(&header, &sets[0]); err != nil {
		return fmt.Errorf("keep the own capabilities: %w", err)
	}
	return nil
}
