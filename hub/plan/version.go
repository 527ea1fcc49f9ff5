package plan

import (
	"bytes"

	"github.com/gpuaas/gpuaas/protocol"
)

// StateVersion identifies a signed state of a node. States are ordered by epoch, then generation; the digest tells two
// states of one number apart and is empty where it is unknown. The zero value is no state.
type StateVersion struct {
	Epoch      uint64
	Generation uint64
	SHA256     []byte
}

// After reports whether v is newer than o.
func (v StateVersion) After(o StateVersion) bool {
	return v.Epoch > o.Epoch || v.Epoch == o.Epoch && v.Generation > o.Generation
}

// Equal reports whether both are the same state.
func (v StateVersion) Equal(o StateVersion) bool {
	return v.Epoch == o.Epoch && v.Generation == o.Generation && bytes.Equal(v.SHA256, o.SHA256)
}

// Contradicts reports whether both have the same number and different content.
func (v StateVersion) Contradicts(o StateVersion) bool {
	return v.Generation > 0 && v.Epoch == o.Epoch && v.Generation == o.Generation &&
		len(v.SHA256) > 0 && len(o.SHA256) > 0 && !bytes.Equal(v.SHA256, o.SHA256)
}

// Supersedes reports whether a state that the node holds replaces the newest in the rows of a restored hub.
func (v StateVersion) Supersedes(newest StateVersion) bool {
	return v.After(newest) || v.Contradicts(newest)
}

// LowestGeneration returns the lowest generation that a node's newest state may have in the hub's epoch, at least
// floor. A restored hub may have forgotten states that the node accepted, or that it holds now under the number of the
// newest state: the next one must be above them (law 2).
func (v StateVersion) LowestGeneration(epoch uint64, accepted, held StateVersion, floor uint64) uint64 {
	if accepted.Epoch == epoch && accepted.Generation > v.Generation {
		floor = max(floor, accepted.Generation+1)
	}
	if held.Epoch == epoch && v.Contradicts(held) {
		floor = max(floor, held.Generation+1)
	}
	return floor
}

// NextGeneration returns the generation of the state after v. A new epoch starts again.
func (v StateVersion) NextGeneration(epoch, lowest uint64) uint64 {
	if v.Epoch < epoch {
		return max(1, lowest)
	}
	return max(v.Generation+1, lowest)
}

// ShowsNewerState reports whether a node refuses a state because it holds another one under that number or a higher
// one.
func ShowsNewerState(r protocol.Nack_Reason) bool {
	return r == protocol.Nack_GENERATION_OLDER || r == protocol.Nack_GENERATION_CONFLICT
}

// GenerationAfterRefusal returns the lowest generation that the node takes after it has refused one because it holds a
// newer state. It returns 0 for a generation above v, which was never sent.
func (v StateVersion) GenerationAfterRefusal(refused uint64) uint64 {
	if refused > v.Generation {
		return 0
	}
	return refused + 1
}
