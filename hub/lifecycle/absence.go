// Package lifecycle decides how an app instance moves on: which actions its status allows, what a node's report means
// for a member, and which steps follow. It is pure. hub/internal/instance keeps the rows; e2e/sim keeps its own.
package lifecycle

// Absence is what the hub knows of a member whose removal was requested and that a report does not mention.
type Absence struct {
	// Epoch and Generation are of the first signed state without the member; Generation is 0 before there is one.
	Epoch, Generation uint64
	// Observed says that the node has reported the member before, under incarnation ObservedIncarnation; empty if unknown.
	Observed            bool
	ObservedIncarnation string
}

// Proven reports whether the absence proves that nothing of the member is left on the node. The node must hold a state
// without the member. Then either it never reported the member, or it reports under another incarnation: its store has
// forgotten the member, and containers still on the machine would have been found and reported.
func (a Absence) Proven(epoch, generation uint64, incarnation string) bool {
	if a.Generation == 0 || epoch < a.Epoch || epoch == a.Epoch && generation < a.Generation {
		return false
	}
	return !a.Observed || a.ObservedIncarnation != "" && incarnation != "" && a.ObservedIncarnation != incarnation
}
