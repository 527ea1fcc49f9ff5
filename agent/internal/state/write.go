package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"

	"github.com/dgraph-io/badger/v4"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// batch gathers what one transaction writes.
type batch struct {
	withCode func(key string, value []byte) []byte
	sets     []entry
	deletes  []string
	bytes    int
	err      error
}

type entry struct {
	key   string
	value []byte
}

func (b *batch) raw(key string, value []byte) {
	b.sets = append(b.sets, entry{key, value})
	b.bytes += len(key) + len(value)
}

func (b *batch) json(key string, v any) {
	raw, err := json.Marshal(v)
	b.err = errors.Join(b.err, err)
	b.raw(key, b.withCode(key, raw))
}

func (b *batch) proto(key string, m proto.Message) {
	raw, err := proto.Marshal(m)
	b.err = errors.Join(b.err, err)
	b.raw(key, raw)
}

func (b *batch) delete(keys ...string) { b.deletes = append(b.deletes, keys...) }

// write makes one synced transaction of what fill gathers and then lets apply change the mirror. The mutex is held.
func (s *Store) write(fill func(*batch), apply func(*data)) error {
	return s.commit(acquiring, fill, apply)
}

var errClosed = errors.New("state: closed")

// release is write for a change that ends something: it takes effect on a full disk, too, and fails only in encoding.
func (s *Store) release(fill func(*batch), apply func(*data)) error {
	return s.commit(releasing, fill, apply)
}

func (s *Store) commit(kind need, fill func(*batch), apply func(*data)) error {
	if s.closed {
		return errClosed
	}
	b := &batch{withCode: s.withCode}
	fill(b)
	if b.err != nil {
		return fmt.Errorf("state: encode: %w", b.err)
	}
	err := s.checkSpace(kind, uint64(b.bytes))
	if err == nil {
		err = s.put(b)
	}
	if err != nil && kind != acquiring {
		err = s.postpone(kind, b, err)
	}
	if err != nil {
		return err
	}
	apply(&s.d)
	s.d.clearSetAside(b)
	_ = s.saveHighest() // AcceptState says when that fails, and the next change tries again
	return nil
}

// put writes the pending changes, then a batch.
func (s *Store) put(b *batch) error {
	if err := s.writePending(); err != nil {
		return err
	}
	failpoint.Hit("agent/store/writing")
	if err := s.update(b); err != nil {
		return err
	}
	failpoint.Hit("agent/store/synced")
	return nil
}

func (s *Store) update(b *batch) error {
	err := s.db.Update(func(tx *badger.Txn) error {
		for _, k := range b.deletes {
			if err := tx.Delete([]byte(k)); err != nil {
				return err
			}
		}
		for _, e := range b.sets {
			if err := tx.Set([]byte(e.key), e.value); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fault.New(fault.Unavailable, codeStateWriteFailed,
			fmt.Sprintf("The state in %s could not be written; nothing was changed.", s.dir), err)
	}
	return nil
}

// postpone keeps a batch until there is space, in the reserve file where that is possible. why is returned where the
// batch is not kept.
func (s *Store) postpone(kind need, b *batch, why error) error {
	most := reserveBytes
	if kind == measuring {
		most /= 2
	}
	next := s.pending.with(b)
	err := s.savePending(next, most)
	if err != nil && kind == measuring {
		return why
	}
	s.pending, s.unsaved = next, err != nil
	return nil
}

// writePending moves the pending changes to the database, in pieces that fit a transaction. A crash in between repeats
// it.
func (s *Store) writePending() error {
	if s.copied {
		db, err := openBadger(s.dir)
		if err != nil {
			return err
		}
		err = s.db.Close()
		s.db, s.copied = db, false
		if err = errors.Join(err, os.RemoveAll(s.copyDir)); err != nil {
			return err
		}
	}
	if s.pending.empty() {
		return nil
	}
	for keys := range slices.Chunk(slices.Sorted(maps.Keys(s.pending.Deletes)), chunkKeys) {
		if err := s.update(&batch{deletes: keys}); err != nil {
			return err
		}
	}
	b := &batch{}
	for key, value := range s.pending.Sets {
		if b.raw(key, value); b.bytes < chunkBytes {
			continue
		}
		if err := s.update(b); err != nil {
			return err
		}
		b = &batch{}
	}
	if err := s.update(b); err != nil {
		return err
	}
	if err := s.savePending(pending{}, reserveBytes); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	s.pending, s.unsaved = pending{}, false
	return nil
}
