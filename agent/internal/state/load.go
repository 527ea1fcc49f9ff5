package state

import (
	"fmt"
	"maps"
	"slices"

	"github.com/dgraph-io/badger/v4"
	"github.com/google/uuid"

	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func (s *Store) load() error {
	s.d = data{
		unverified: map[string]string{},
		stored:     map[string][]byte{},
		batches:    map[string]*protocol.Envelope{},
		leaseFrom:  map[string]string{},
		sample:     sample{},
		parts:      map[string]part{},
		admissions: map[string]admission.Decision{},
		leases:     map[string]*protocol.Lease{},
		members:    map[string]Member{},
		runs:       map[string]Run{},
		consumed:   map[string]map[string]int64{},
		sizes:      map[uint64]int64{},
	}
	err := s.db.View(func(tx *badger.Txn) error {
		// The chain says which segments are this incarnation's, also where it waits for space.
		if raw, newer := s.pending.Sets[keyChain]; newer {
			if err := s.read(keyChain, raw); err != nil {
				return fmt.Errorf("%s: %w", keyChain, err)
			}
		}
		it := tx.NewIterator(badger.IteratorOptions{PrefetchValues: true, PrefetchSize: 8})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			key := string(it.Item().KeyCopy(nil))
			if s.pending.has(key) {
				continue
			}
			if err := it.Item().Value(func(value []byte) error { return s.read(key, value) }); err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
		}
		return s.loadPending()
	})
	if err != nil {
		return unreadable(s.dir, err)
	}
	if s.d.meta.Format == 0 {
		m := meta{Format: formatVersion, Incarnation: uuid.NewString(), Highest: true}
		chain := spool.Chain{Incarnation: m.Incarnation}
		return s.write(func(b *batch) { b.json(keyMeta, m); b.json(keyChain, chain) }, func(d *data) {
			d.meta, d.chain, d.stored = m, chain, nil
		})
	}
	if s.d.meta.Format != formatVersion {
		return fault.New(fault.Conflict, codeStateFormat,
			fmt.Sprintf("The state in %s was written by another release (format %d, this one reads %d).", s.dir, s.d.meta.Format,
				formatVersion), nil)
	}
	s.d.setMarks(s.d.marks)
	return s.gcSegments()
}

func (s *Store) loadPending() error {
	for _, key := range slices.Sorted(maps.Keys(s.pending.Sets)) {
		if err := s.read(key, s.pending.Sets[key]); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	s.d.assembleMeter()
	return nil
}
