package state

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/protocol"
)

// Highest is the highest that the node has accepted. It is kept beside the database, because a damaged log of the
// database loses its newest transactions without a sign: what was accepted before them is signed, too.
type Highest struct {
	Epoch, Generation, BundleVersion uint64
}

// beyond reports whether the state of the epoch and generation is older.
func (h Highest) beyond(epoch, generation uint64) bool {
	return cmp.Or(cmp.Compare(h.Epoch, epoch), cmp.Compare(h.Generation, generation)) > 0
}

// State returns an error for a state that is older than the highest one.
func (h Highest) State(epoch, generation uint64) error {
	switch {
	case epoch < h.Epoch:
		return protocol.Refuse(protocol.Nack_EPOCH_UNKNOWN, "the desired state is of epoch %d, this node has accepted "+
			"epoch %d",
			epoch, h.Epoch)
	case h.beyond(epoch, generation):
		return protocol.Refuse(protocol.Nack_GENERATION_OLDER, "generation %d is older than generation %d, which this node "+
			"has "+
			"accepted", generation, h.Generation)
	}
	return nil
}

// Bundle returns an error for a trust bundle that is older than the highest one.
func (h Highest) Bundle(version uint64) error {
	if version < h.BundleVersion {
		return protocol.Refuse(protocol.Nack_GENERATION_OLDER, "trust bundle %d is older than trust bundle %d, which this "+
			"node has "+
			"accepted", version, h.BundleVersion)
	}
	return nil
}

// The file has two slots in blocks of their own, which are allocated while there is space: a torn write leaves the
// other one whole, and a full disk takes it.
const (
	highestName      = "highest"
	highestSlotBytes = 4 << 10
	highestVersion   = 1
)

// highestSlot is what a slot begins with, before its authentication code.
type highestSlot struct {
	Version, Number uint64
	Highest         Highest
}

// highestFile is what is known of the file.
type highestFile struct {
	number uint64
	saved  Highest
	// whole says that a slot has its authentication code.
	whole bool
}

func (s *Store) readHighest() {
	file, err := os.Open(filepath.Join(s.dir, highestName))
	if err != nil {
		return // not whole
	}
	defer func() { _ = file.Close() }()
	for at := range int64(slots) {
		var slot highestSlot
		size := binary.Size(slot)
		raw := make([]byte, size+codeBytes)
		if _, err := file.ReadAt(raw, at*highestSlotBytes); err != nil {
			continue
		}
		_, err := binary.Decode(raw[:size], binary.BigEndian, &slot)
		if err != nil || string(raw[size:]) != string(s.code(highestName, raw[:size])) || slot.Version != highestVersion {
			continue
		}
		if !s.file.whole || slot.Number > s.file.number {
			s.file = highestFile{number: slot.Number, saved: slot.Highest, whole: true}
		}
	}
	s.highest = s.file.saved
}

// saveHighest follows what is accepted. The file comes after the database, so that a crash in between leaves the file
// behind, which is no sign of damage; a write that fails is tried again with the next change.
func (s *Store) saveHighest() error {
	if s.d.state != nil && !s.highest.beyond(s.d.state.GetEpoch(), s.d.state.GetGeneration()) {
		s.highest.Epoch, s.highest.Generation = s.d.state.GetEpoch(), s.d.state.GetGeneration()
	}
	if b := s.d.bundle(); b.Valid() {
		s.highest.BundleVersion = max(s.highest.BundleVersion, b.Version())
	}
	_, aside := s.d.unverified[keyState]
	switch {
	case s.d.stored != nil:
		return errors.New("state: nothing is verified yet")
	case s.file.whole && s.file.saved == s.highest:
		return nil
	case s.unsaved:
		return errors.New("state: what was accepted is not stored")
	case !s.file.whole && aside:
		// A whole file would vouch for the state at the next start.
		return errors.New("state: the state is set aside")
	}
	next := highestFile{number: s.file.number + 1, saved: s.highest, whole: true}
	if err := s.writeHighest(next); err != nil {
		return err
	}
	s.file = next
	return nil
}

func (s *Store) writeHighest(f highestFile) error {
	raw, err := binary.Append(nil, binary.BigEndian, highestSlot{highestVersion, f.number, f.saved})
	if err != nil {
		return err
	}
	raw = append(raw, s.code(highestName, raw)...)
	file, err := os.OpenFile(filepath.Join(s.dir, highestName), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("state: %w", err)
	}
	_, err = file.WriteAt(raw, int64(f.number%slots)*highestSlotBytes)
	if err == nil {
		err = unix.Fdatasync(int(file.Fd()))
	}
	return errors.Join(err, file.Close())
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
