package state

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// room refuses a write of this many bytes when the disk would be left with less than the reserve.
func (s *Store) room(bytes uint64) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(s.dir, &fs); err != nil {
		return fault.New(fault.Unavailable, "state_unusable", fmt.Sprintf("The free space under %s cannot be read.", s.dir), err)
	}
	free := fs.Bavail * uint64(fs.Bsize)
	if free >= s.minFree+bytes {
		return nil
	}
	return fault.New(fault.Unavailable, "disk_full", fmt.Sprintf(
		"The disk under %s has %d MiB free, %d are needed. Free some space; what runs goes on, and usage that was measured is kept.",
		s.dir, free>>20, (s.minFree+bytes)>>20), nil)
}
