// Package nodeidentity decides whether a node is the one that the hub knows: whether its store fell behind, and whether
// two machines use one key. It is pure; hub/internal/fleet keeps the rows.
package nodeidentity

import "slices"

// Store is a node's store as a hello describes it, or as the hub recorded the last hello.
type Store struct {
	Incarnation string
	// Epoch and Generation are of the newest accepted state.
	Epoch, Generation uint64
}

// StoreBehind reports whether a store remembers less than the hub recorded of it, so that it must take a new
// incarnation. lastSegment is the newest segment sealed in the store, posted the newest one of its incarnation that the
// hub has. Suspect incarnations were used while two machines shared the node's key: each may lack what the other sent.
func StoreBehind(hello, last Store, lastSegment, posted uint64, suspect []string) bool {
	older := hello.Epoch < last.Epoch || hello.Epoch == last.Epoch && hello.Generation < last.Generation
	// A new store owes the hub nothing.
	same := hello.Incarnation != "" && hello.Incarnation == last.Incarnation
	return same && older || lastSegment < posted || slices.Contains(suspect, hello.Incarnation)
}

// CloneDetected reports, at a report, whether another process than the sender uses the node's key. lastSession is the
// session that the sender's hello named: the last one it was welcomed to, 0 after a start. reported is the newest
// session before the present one in which the hub took a report. If that is newer than lastSession, another process was
// welcomed while the sender was alive. A late hello is never followed by a report, so it raises no alarm.
func CloneDetected(lastSession, reported uint64) bool {
	return lastSession != 0 && lastSession < reported
}
