package heard

import "slices"

// Store is what a node says of its store in a hello, or what the hub remembers of the last one.
type Store struct {
	Incarnation string
	// Epoch and Generation are of the newest state in it.
	Epoch, Generation uint64
}

// Behind reports whether a store remembers less than the hub has heard from it, and so must take a new incarnation.
// lastSegment is the newest one sealed in it, posted the newest one of its incarnation that the hub has. suspect are
// incarnations that were heard while two machines spoke with the node's key: either of them may have said what the
// other does not know.
func Behind(said, last Store, lastSegment, posted uint64, suspect []string) bool {
	older := said.Epoch < last.Epoch || said.Epoch == last.Epoch && said.Generation < last.Generation
	// A new store owes the hub nothing.
	same := said.Incarnation != "" && said.Incarnation == last.Incarnation
	return same && older || lastSegment < posted || slices.Contains(suspect, said.Incarnation)
}

// NotAlone reports, at a report, whether another process than the one that sent it has the node's key. lastSession is
// what the process said hello with: the last session that it was welcomed to. reported is the newest session, before
// its present one, in which the hub took a report. That report came from a process that had been welcomed to it: if
// that was not this one, which was there before and is there now, then the two live at the same time. A process that
// starts anew names no session, and a hello that comes late is never followed by a report: neither is taken for a
// second machine.
func NotAlone(lastSession, reported uint64) bool { return lastSession != 0 && lastSession < reported }
