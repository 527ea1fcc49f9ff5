package network

import (
	"errors"

	"github.com/vishvananda/netlink"
)

// maxDumps bounds how often a listing is asked for that changes while the kernel gives it out.
const maxDumps = 10

// dumped asks the kernel for a listing again where it changed meanwhile (NLM_F_DUMP_INTR, netlink(7)): other programs
// make links and addresses at any time, and a part of the answer may be missing.
func dumped[T any](list func() ([]T, error)) (all []T, err error) {
	for range maxDumps {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}
