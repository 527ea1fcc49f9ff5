package state

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/protocol"
)

// Highest holds the highest numbers that the node has accepted. They are kept beside the database: a damaged log of the
// database loses its newest transactions silently, and older documents are signed as well.
type Highest struct {
	State         agent.StateNumber
	BundleVersion uint64
}

// Bundle returns an error for a trust bundle that is older than the highest one.
func (h Highest) Bundle(version uint64) error {
	if version < h.BundleVersion {
		return protocol.Refuse(protocol.Nack_GENERATION_OLDER, "trust bundle %d is older than trust bundle %d, which this "+
			"node has accepted", version, h.BundleVersion)
	}
	return nil
}

const (
	highestName = "highest"
	// highestSlotBytes is a block of the file system: no two slots share one.
	highestSlotBytes = 4 << 10
)

// readHighest leaves zeros where the file is missing or altered.
func (s *Store) readHighest() {
	raw, err := s.highestFile.read()
	if err == nil && raw != nil {
		_, err = binary.Decode(raw, binary.BigEndian, &s.saved)
	}
	if err != nil {
		s.highestFile.number, s.saved = 0, Highest{}
	}
	s.highest = s.saved
}

// saveHighest updates the file. The file is written after the database, so that a crash in between leaves the file
// behind, which is no sign of damage; the next change repeats a write that fails.
func (s *Store) saveHighest() error {
	if accepted := agent.NumberOf(s.d.state); accepted.Compare(s.highest.State) > 0 {
		s.highest.State = accepted
	}
	if b := s.d.bundle(); b.Valid() {
		s.highest.BundleVersion = max(s.highest.BundleVersion, b.Version())
	}
	_, aside := s.d.unverified[keyState]
	whole := s.highestFile.number > 0
	switch {
	case s.d.stored != nil:
		return errors.New("state: nothing is verified yet")
	case whole && s.saved == s.highest:
		return nil
	case s.unsaved:
		return errors.New("state: what was accepted is not stored")
	case !whole && aside:
		// A whole file would vouch for the state at the next start.
		return errors.New("state: the state is set aside")
	}
	raw, err := binary.Append(nil, binary.BigEndian, s.highest)
	if err == nil {
		err = s.highestFile.write(raw, highestSlotBytes)
	}
	if err != nil {
		return fmt.Errorf("state: %w", err)
	}
	s.saved = s.highest
	return nil
}

// resumeHighest notes in the store that the file exists: from then on a store without it does not start anything.
func (s *Store) resumeHighest() error {
	if err := s.saveHighest(); err != nil || s.d.meta.Highest {
		return nil //nolint:nilerr // the next change tries again
	}
	m := s.d.meta
	m.Highest = true
	return s.release(func(b *batch) { b.json(keyMeta, m) }, func(d *data) { d.meta = m })
}
