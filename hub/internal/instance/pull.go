package instance

import (
	"math"

	"github.com/gpuaas/gpuaas/protocol"
)

// PullPhase is the word of the contracts for the phase of a pull; one that this hub does not know is fetching.
func PullPhase(p *protocol.ImagePull) string {
	switch p.GetPhase() {
	case protocol.ImagePull_RESOLVING:
		return "resolving"
	case protocol.ImagePull_UNPACKING:
		return "unpacking"
	case protocol.ImagePull_PHASE_UNSPECIFIED, protocol.ImagePull_FETCHING:
	}
	return "fetching"
}

// PullBytes is a number of bytes that a node reports, within what the contracts can carry.
func PullBytes(n uint64) int64 { return int64(min(n, math.MaxInt64)) }
