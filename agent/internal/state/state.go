// Package state is the agent's durable memory: trust bundle, accepted desired state, leases, members, the journal of
// container runs, measured usage and the time. A change is on disk before anyone hears of it. It is the only user of Badger
// and talks neither to the hub nor to containerd.
package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
	"github.com/google/uuid"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Sizes of the store. It holds little, so what Badger keeps in memory is small too.
const (
	memTableBytes = 8 << 20
	vlogFileBytes = 16 << 20
	// valueThresholdBytes keeps documents and segments out of the tables, whose writes are bounded by the memtable.
	valueThresholdBytes = 16 << 10
	// chunkBytes bounds what is written ahead of a transaction that would be too big for the memtable in one piece.
	chunkBytes = 256 << 10
	blockBytes = 4 << 10
	// compactAt tables, each a full memtable, are merged at the next CollectGarbage. Badger's own compactors would look for such work
	// twenty times a second, which costs an idle node a part of a core; neverStall keeps writes from waiting for them.
	compactAt  = 2
	neverStall = 1 << 20
	// DefaultMinFreeBytes must stay free on the disk, or nothing is written: Badger maps its files, and a full disk
	// under a mapped file kills the process instead of returning an error.
	DefaultMinFreeBytes = 64 << 20
	// MaxTombstones is how many removed members are remembered for the hub; the oldest acknowledged ones go first.
	MaxTombstones = 4096
)

// formatVersion is written into a new store. A store of another one is not opened.
const formatVersion = 1

// Keys. The first byte after the slash says what follows.
const (
	keyMeta     = "meta"
	keyBundle   = "bundle"
	keyState    = "state"
	keyBatch    = "leases"
	keyMeter    = "meter"
	keyChain    = "chain"
	keyMarks    = "marks"
	keyStamp    = "stamp"
	preLease    = "lease/"
	prePart     = "part/"
	preVerdict  = "verdict/"
	preMember   = "member/"
	preRun      = "run/"
	preSegment  = "segment/"
	preConsumed = "consumed/"
)

// Options configures Open. The zero value is for production.
type Options struct {
	// MinFreeBytes is DefaultMinFreeBytes when zero.
	MinFreeBytes uint64
	// MaxUnsentBytes is spool.MaxUnsentBytes when zero.
	MaxUnsentBytes int64
}

// Store is the durable memory. All methods may be called at the same time; each change is one synced transaction.
type Store struct {
	db        *badger.DB
	dir       string
	minFree   uint64
	maxUnsent int64

	mu   sync.Mutex
	node identity
	d    data
	subs []chan struct{}
	// usageSubs are those of SubscribeUsage.
	usageSubs []chan struct{}
	closed    bool
}

type identity struct {
	id     string
	signer protocol.Signer
}

// data mirrors the disk. It changes only after a write has succeeded.
type data struct {
	meta     meta
	bundle   protocol.Bundle
	state    *protocol.DesiredState
	stateEnv *protocol.Envelope
	batchEnv *protocol.Envelope
	// parts by hex SHA-256.
	parts    map[string]part
	verdicts map[string]Verdict
	leases   map[string]*protocol.Lease
	members  map[string]Member
	runs     map[string]Run
	consumed map[string]map[string]int64
	meter    meter.State
	chain    spool.Chain
	marks    spool.Marks
	stamp    clock.Stamp
	// unsent counts the bytes of segments that the hub has not posted; sizes their single sizes.
	unsent int64
	sizes  map[uint64]int64
}

type meta struct {
	Format      int    `json:"format"`
	Incarnation string `json:"incarnation"`
}

type part struct {
	// raw is set only until it has been written.
	raw      []byte
	workload *protocol.Workload
}

// Open opens the store in dir, or makes a new one with a new incarnation.
func Open(dir string, o Options) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fault.New(fault.Unavailable, "state_unusable", fmt.Sprintf("The state directory %s cannot be made: %v.", dir, rootCause(err)), err)
	}
	s := &Store{dir: dir, minFree: o.MinFreeBytes, maxUnsent: o.MaxUnsentBytes}
	if s.minFree == 0 {
		s.minFree = DefaultMinFreeBytes
	}
	if s.maxUnsent == 0 {
		s.maxUnsent = spool.MaxUnsentBytes
	}
	if err := s.room(0); err != nil {
		return nil, err
	}
	db, err := badger.Open(badgerOptions(dir))
	if err != nil {
		return nil, fault.New(fault.Unavailable, "state_unusable",
			fmt.Sprintf("The state in %s cannot be opened. If another agent uses it, stop that one first.", dir), err)
	}
	s.db = db
	if err := s.load(); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return s, nil
}

func badgerOptions(dir string) badger.Options {
	return badger.DefaultOptions(dir).
		WithSyncWrites(true).
		WithLogger(nil).
		WithMemTableSize(memTableBytes).WithNumMemtables(2).
		WithBaseTableSize(memTableBytes / 2).WithBaseLevelSize(memTableBytes).
		WithValueLogFileSize(vlogFileBytes).WithValueThreshold(valueThresholdBytes).
		WithBlockSize(blockBytes).WithBlockCacheSize(0).WithIndexCacheSize(0).
		WithCompression(options.None).
		WithNumCompactors(0).WithNumLevelZeroTables(compactAt).WithNumLevelZeroTablesStall(neverStall).
		WithNumGoroutines(1).
		WithMetricsEnabled(false).
		WithDetectConflicts(false). // one writer: the mutex
		WithVerifyValueChecksum(true)
}

// Close syncs and closes. Whatever is called afterwards fails.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	return s.db.Close()
}

// Identify names the node, whose key signs usage segments. Call it before anything is started.
func (s *Store) Identify(nodeID string, signer protocol.Signer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.d.chain.NodeID != "" && s.d.chain.NodeID != nodeID {
		return fault.New(fault.Conflict, "state_of_another_node",
			fmt.Sprintf("The state in %s belongs to node %s, not to %s. Give this agent an empty data directory.", s.dir, s.d.chain.NodeID, nodeID), nil)
	}
	s.node = identity{nodeID, signer}
	if s.d.chain.NodeID == nodeID {
		return nil
	}
	chain := s.d.chain
	chain.NodeID = nodeID
	return s.write(func(b *batch) { b.json(keyChain, chain) }, func(d *data) { d.chain = chain })
}

// SignRefusal signs, with the node's key, that its owner refused what the status is about.
func (s *Store) SignRefusal(status *protocol.WorkloadStatus) error {
	s.mu.Lock()
	node := s.node
	s.mu.Unlock()
	if node.signer == nil {
		return errors.New("state: nothing can be signed before the node is identified")
	}
	return status.RefuseAsOwner(node.id, node.signer)
}

// NodeID is what Identify was given, or what the store remembers of it.
func (s *Store) NodeID() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.d.chain.NodeID
}

// Incarnation names this store's life.
func (s *Store) Incarnation() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.d.meta.Incarnation
}

// Subscribe returns a channel that gets a signal after each accepted document. It carries no data, and signals that nobody
// took are merged.
func (s *Store) Subscribe() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := make(chan struct{}, 1)
	s.subs = append(s.subs, c)
	return c
}

func (s *Store) wake() { signal(s.subs) }

func signal(subs []chan struct{}) {
	for _, c := range subs {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// batch gathers what one transaction writes.
type batch struct {
	sets    []entry
	deletes []string
	bytes   int
	err     error
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
	b.raw(key, raw)
}

func (b *batch) proto(key string, m proto.Message) {
	raw, err := proto.Marshal(m)
	b.err = errors.Join(b.err, err)
	b.raw(key, raw)
}

func (b *batch) delete(key string) { b.deletes = append(b.deletes, key) }

// write makes one synced transaction of what fill gathers and then lets apply change the mirror. The mutex is held.
func (s *Store) write(fill func(*batch), apply func(*data)) error {
	if s.closed {
		return errors.New("state: closed")
	}
	b := &batch{}
	fill(b)
	if b.err != nil {
		return fmt.Errorf("state: encode: %w", b.err)
	}
	if err := s.room(uint64(b.bytes)); err != nil {
		return err
	}
	failpoint.Hit("agent/state/writing")
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
		return fault.New(fault.Unavailable, "state_write_failed",
			fmt.Sprintf("The state in %s could not be written; nothing was changed.", s.dir), err)
	}
	failpoint.Hit("agent/state/synced")
	apply(&s.d)
	return nil
}

func (s *Store) load() error {
	s.d = data{
		parts: map[string]part{}, verdicts: map[string]Verdict{}, leases: map[string]*protocol.Lease{}, members: map[string]Member{},
		runs: map[string]Run{}, consumed: map[string]map[string]int64{}, sizes: map[uint64]int64{},
	}
	err := s.db.View(func(tx *badger.Txn) error {
		it := tx.NewIterator(badger.IteratorOptions{PrefetchValues: true, PrefetchSize: 8})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			key := string(it.Item().KeyCopy(nil))
			err := it.Item().Value(func(value []byte) error { return s.d.read(key, value) })
			if err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
		}
		return nil
	})
	if err != nil {
		return fault.New(fault.Unavailable, "state_unreadable",
			fmt.Sprintf("The state in %s is damaged. Keep a copy of it, then start with an empty directory: the node takes a new incarnation.", s.dir), err)
	}
	if s.d.meta.Format == 0 {
		m := meta{Format: formatVersion, Incarnation: uuid.NewString()}
		chain := spool.Chain{Incarnation: m.Incarnation}
		return s.write(func(b *batch) { b.json(keyMeta, m); b.json(keyChain, chain) }, func(d *data) { d.meta, d.chain = m, chain })
	}
	if s.d.meta.Format != formatVersion {
		return fault.New(fault.Conflict, "state_format",
			fmt.Sprintf("The state in %s was written by another release (format %d, this one reads %d).", s.dir, s.d.meta.Format, formatVersion), nil)
	}
	return s.tidy()
}

// rootCause is the innermost error, whose text names no path a second time.
func rootCause(err error) error {
	if p, is := errors.AsType[*os.PathError](err); is {
		return p.Err
	}
	return err
}

// CollectGarbage gives disk space of overwritten values back. Call it now and then; it does nothing when there is little.
func (s *Store) CollectGarbage() error {
	if s.db.Levels()[0].NumTables >= compactAt {
		if err := s.db.Flatten(1); err != nil {
			return err
		}
	}
	err := s.db.RunValueLogGC(0.5)
	if errors.Is(err, badger.ErrNoRewrite) || errors.Is(err, badger.ErrRejected) {
		return nil
	}
	return err
}

// Dir is where the store is.
func (s *Store) Dir() string { return filepath.Clean(s.dir) }
