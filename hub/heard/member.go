package heard

// Absence is what the hub remembers of a member that is to go and that a report does not mention.
type Absence struct {
	// Epoch and Generation are of the first signed state without the member; Generation is 0 before there is one.
	Epoch, Generation uint64
	// Spoken says that the node has spoken of the member before, in its incarnation SpokenIn; empty where that is not
	// known.
	Spoken   bool
	SpokenIn string
}

// Proven reports whether silence proves that nothing of the member is left. It does when the node looked while it held
// a state without the member, and either never had it, or speaks under another incarnation than the one that did: its
// disk has forgotten the member, and whatever of it were still on the machine would have been found and spoken of.
func (a Absence) Proven(epoch, generation uint64, incarnation string) bool {
	if a.Generation == 0 || epoch < a.Epoch || epoch == a.Epoch && generation < a.Generation {
		return false
	}
	return !a.Spoken || a.SpokenIn != "" && incarnation != "" && a.SpokenIn != incarnation
}
