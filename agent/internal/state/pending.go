package state

import (
	"bytes"
	"encoding/gob"
	"maps"
)

const (
	// reserveName is the file of the changes that wait for space on the disk, reserveBytes what they may take.
	reserveName  = "reserve"
	reserveBytes = 8 << 20
)

// pending are changes that wait for space on the disk, by key.
type pending struct {
	Sets    map[string][]byte
	Deletes map[string]bool
}

// with returns the changes and what a batch writes after them.
func (p pending) with(b *batch) pending {
	next := pending{map[string][]byte{}, map[string]bool{}}
	maps.Copy(next.Sets, p.Sets)
	maps.Copy(next.Deletes, p.Deletes)
	for _, key := range b.deletes {
		next.Deletes[key] = true
		delete(next.Sets, key)
	}
	for _, e := range b.sets {
		next.Sets[e.key] = e.value
		delete(next.Deletes, e.key)
	}
	return next
}

func (p pending) has(key string) bool {
	_, set := p.Sets[key]
	return set || p.Deletes[key]
}

func (p pending) empty() bool { return len(p.Sets) == 0 && len(p.Deletes) == 0 }

// savePending makes the changes durable in the reserve file, if they take at most this many bytes.
func (s *Store) savePending(p pending, most int) error {
	var raw bytes.Buffer
	if err := gob.NewEncoder(&raw).Encode(p); err != nil {
		return err
	}
	return s.reserve.write(raw.Bytes(), most)
}

func (s *Store) readPending() error {
	raw, err := s.reserve.read()
	if err != nil || raw == nil {
		return err
	}
	return gob.NewDecoder(bytes.NewReader(raw)).Decode(&s.pending)
}
