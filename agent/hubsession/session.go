// Package hubsession holds the rules of a node's session to its hub: the pause before a dial, how the node answers the
// hub's welcome, which usage segments it sends and when it sends them again, how long a change waits to be reported,
// and which removal proofs a report repeats. It is pure: agent/internal/uplink applies the rules to a connection and a
// store, e2e/sim to its models of both.
package hubsession

import (
	"errors"
	"time"

	"github.com/gpuaas/gpuaas/agent/spool"
)

const (
	// DefaultReportInterval is the pause between reports when nothing changes.
	DefaultReportInterval = 30 * time.Second
	// HelloTimeout bounds the exchange of hello and welcome.
	HelloTimeout = 15 * time.Second
	// AckTimeout bounds the wait for one acknowledgement of usage.
	AckTimeout = time.Minute
)

var (
	// ErrNewIncarnation ends a session because the store has taken a new incarnation; the next session opens under it.
	ErrNewIncarnation = errors.New("dialling again under a new incarnation")
	// ErrGoAway ends a session that the hub has ended.
	ErrGoAway = errors.New("the hub ends the session")

	errStoreBehind = errors.New("the store is behind the hub's record")
)

// Welcome is the part of the hub's answer to a hello that concerns the node's store.
type Welcome struct {
	// NewIncarnation: the hub has posted more segments than the store has sealed.
	NewIncarnation bool
	spool.HubProgress
}

// Store is the part of the node's store that a welcome changes.
type Store interface {
	// PostedSegment is the newest segment that counts as posted.
	PostedSegment() uint64
	AcknowledgeUsage(hub spool.HubProgress) error
	RewindUsage(posted uint64) error
	TakeNewIncarnation(why error) error
}

// Open applies a welcome to the store. It fails with ErrNewIncarnation when the hub has posted other segments than the
// store has sealed, or lacks segments that the store keeps no more: the store has a new incarnation then, and the node
// dials again.
func Open(s Store, w Welcome) error {
	if w.NewIncarnation {
		return Renew(s, errStoreBehind)
	}
	err := s.AcknowledgeUsage(w.HubProgress)
	if errors.Is(err, spool.ErrOtherStore) {
		return Renew(s, err)
	}
	if err != nil {
		return err
	}
	if w.Posted < s.PostedSegment() {
		if err := s.RewindUsage(w.Posted); err != nil {
			// The numbers of this incarnation have a gap now; what the store still keeps is sealed again under a new one.
			return Renew(s, err)
		}
	}
	return nil
}

// Renew gives the store a new incarnation and returns ErrNewIncarnation.
func Renew(s Store, why error) error {
	if err := s.TakeNewIncarnation(why); err != nil {
		return err
	}
	return ErrNewIncarnation
}
