// Package state is the agent's durable memory: trust bundle, accepted desired state, leases, members, the journal of
// container runs, measured usage and the time. A change is on disk before subscribers wake. It is the only user of
// Badger and talks neither to the hub nor to containerd.
package state

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"

	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/agent/clock"
	"github.com/gpuaas/gpuaas/agent/meter"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/notify"
	"github.com/gpuaas/gpuaas/protocol"
)

// Sizes of the store. It holds little, so what Badger keeps in memory is small too.
const (
	memTableBytes = 8 << 20
	vlogFileBytes = 16 << 20
	// valueThresholdBytes keeps large documents out of the tables. Whatever is overwritten often must stay below it: the
	// value log gives space back only after the tables that point into it were merged.
	valueThresholdBytes = 256 << 10
	// chunkBytes bounds what is written ahead of a transaction that would be too big for the memtable in one piece.
	chunkBytes = 256 << 10
	chunkKeys  = 1000
	blockBytes = 4 << 10
	// compactAt tables, each a full memtable, are merged at the next CollectGarbage. Badger's own compactors would poll
	// for such work twenty times a second, which costs an idle node a part of a core; neverStall keeps writes from waiting
	// for them.
	compactAt  = 2
	neverStall = 1 << 20
	// flattenAfter is the age at which a single table is merged, too: then the value log learns what was overwritten.
	flattenAfter = 24 * time.Hour
	// DefaultMinFreeBytes must stay free on the disk, or nothing new is stored: Badger maps its files, and a full disk
	// under a mapped file kills the process instead of returning an error.
	DefaultMinFreeBytes = 64 << 20
	// MaxTombstones is how many removed members are remembered for the hub; the oldest acknowledged ones go first.
	MaxTombstones = 4096
	// MaxBundles is how many trust bundles are kept for what was admitted under them. Those that a change of the root made
	// are kept beyond that.
	MaxBundles = 16
)

// formatVersion is written into a new store. A store of another one is not opened.
const formatVersion = 1

// Keys. The first byte after the slash says what follows.
const (
	keyMeta     = "meta"
	keyState    = "state"
	keySample   = "sample"
	keyChain    = "chain"
	keyMarks    = "marks"
	keyStamp    = "stamp"
	preBatch    = "batch/"
	preBundle   = "bundle/"
	prePart     = "part/"
	preMember   = "member/"
	preRun      = "run/"
	preSegment  = "segment/"
	preConsumed = "consumed/"
	preInterval = "interval/"
	preMetered  = "metered/"
)

// Options configures Open. The zero value is for production.
type Options struct {
	// MinFreeBytes is DefaultMinFreeBytes when zero.
	MinFreeBytes uint64
	// MaxUnsentBytes is spool.MaxUnsentBytes when zero.
	MaxUnsentBytes int64
	// MaxTombstones is MaxTombstones when zero.
	MaxTombstones int
	// LargeBytes is DefaultLargeBytes when zero.
	LargeBytes int64
	// CopyDir is a directory on another file system, best in memory, where a store is opened whose own disk is full.
	// Without one a store on a full disk cannot be opened.
	CopyDir string
	// Key authenticates the node's own records. It belongs to the node and is not kept in the store.
	Key []byte
}

// Store is the durable memory. All methods may be called at the same time; each change is one synced transaction.
type Store struct {
	dir        string
	copyDir    string
	minFree    uint64
	maxUnsent  int64
	tombstones int
	largeBytes int64
	key        []byte

	mu sync.Mutex
	db *badger.DB
	// copied says that db is a copy in copyDir, which is only read: the disk was full when the store was opened.
	copied bool
	// pending are the changes since the disk became full. They are durable in the reserve file unless unsaved says that
	// they are not.
	pending pending
	unsaved bool
	reserve slotFile
	// highest is what is accepted, or was before the store lost it; saved is how much of that highestFile holds.
	highest, saved Highest
	highestFile    slotFile
	flattenedAt    time.Time

	// signer is the node's key; nil before Identify.
	signer protocol.Signer
	d      data
	closed bool

	// changed wakes after each accepted document, sealed after each segment.
	changed, sealed notify.Broadcast
}

// data mirrors the disk. It changes only after a write has succeeded.
type data struct {
	meta meta
	// bundles are those that were accepted, the present one last.
	bundles  []protocol.Bundle
	state    *protocol.DesiredState
	stateEnv *protocol.Envelope
	// stored are the signed documents that Resume has still to take; nil afterwards.
	stored map[string][]byte
	// unverified says why keys are set aside; unnamed are documents that no verified document names.
	unverified map[string]string
	unnamed    []string
	// batches are the signed batches that the leases come from, leaseFrom which of them by member.
	batches   map[string]*protocol.Envelope
	leaseFrom map[string]string
	// parts by hex SHA-256.
	parts      map[string]part
	admissions map[string]admission.Decision
	leases     map[string]*protocol.Lease
	members    map[string]Member
	runs       map[string]Run
	consumed   map[string]map[string]int64
	meter      meter.State
	// sample is set only while the store is being read.
	sample sample
	chain  spool.Chain
	marks  spool.Marks
	stamp  clock.Stamp
	// unsent counts the bytes of segments that the hub has not posted; sizes their single sizes.
	unsent int64
	sizes  map[uint64]int64
}

type meta struct {
	Format      int    `json:"format"`
	Incarnation string `json:"incarnation"`
	// LastPort is the host port that was assigned last.
	LastPort uint16 `json:"last_port,omitempty"`
	// Highest says that the file of that name has been written: without it the store starts nothing.
	Highest bool `json:"highest,omitempty"`
}

type part struct {
	// raw is set only until it has been written.
	raw      []byte
	workload *protocol.Workload
}

// Open opens the store in dir, or makes a new one with a new incarnation.
func Open(dir string, o Options) (_ *Store, err error) {
	defer func() {
		if p := recover(); p != nil { // Badger's answer to some of the damage that a file can have
			err = unreadable(dir, fmt.Errorf("badger: %v", p))
		}
	}()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fault.New(fault.Unavailable, codeStateUnusable, fmt.Sprintf("The state directory %s cannot be made: %v.",
			dir, rootCause(err)), err)
	}
	s := &Store{
		dir:         dir,
		copyDir:     o.CopyDir,
		minFree:     cmp.Or(o.MinFreeBytes, DefaultMinFreeBytes),
		maxUnsent:   cmp.Or(o.MaxUnsentBytes, spool.MaxUnsentBytes),
		tombstones:  cmp.Or(o.MaxTombstones, MaxTombstones),
		largeBytes:  cmp.Or(o.LargeBytes, DefaultLargeBytes),
		key:         o.Key,
		flattenedAt: time.Now(),
	}
	if err := s.open(); err != nil {
		return nil, err
	}
	if err := s.load(); err != nil {
		return nil, errors.Join(err, s.db.Close())
	}
	return s, nil
}

// open opens the database and the reserve file. On a full disk it opens a copy of the database in memory: Badger writes
// when it is opened, even to be read only, and a node that cannot start cannot end anything.
func (s *Store) open() (err error) {
	unusable := func(name string, err error) error {
		return fault.New(fault.Unavailable, codeStateUnusable,
			fmt.Sprintf("The file %s in %s cannot be used.", name, s.dir), err)
	}
	full := s.checkSpace(acquiring, slots*reserveBytes+spareBytes)
	for name, size := range map[string]int64{
		spareName: spareBytes, reserveName: slots * reserveBytes, highestName: slots * highestSlotBytes,
	} {
		if full != nil {
			break
		}
		if err := allocate(filepath.Join(s.dir, name), size); err != nil {
			return unusable(name, err)
		}
	}
	s.highestFile = s.slotFile(highestName, highestSlotBytes)
	s.highestFile.create = true
	s.readHighest()
	s.reserve = s.slotFile(reserveName, reserveBytes)
	if err := s.readPending(); err != nil {
		return unusable(reserveName, err)
	}
	dir := s.dir
	if full = s.checkSpace(releasing, 0); full != nil {
		_, missing := os.Stat(filepath.Join(s.dir, badger.ManifestFilename))
		if missing != nil || s.copyDir == "" {
			return full
		}
		if err := copyStore(s.dir, s.copyDir); err != nil {
			return errors.Join(full, fmt.Errorf("copy the store: %w", err))
		}
		dir, s.copied = s.copyDir, true
	} else {
		_ = os.RemoveAll(s.copyDir) // of an earlier process that was killed
	}
	s.db, err = openBadger(dir)
	return err
}

func (s *Store) slotFile(name string, slotBytes int) slotFile {
	code := func(raw []byte) []byte { return s.code(name, raw) }
	return slotFile{path: filepath.Join(s.dir, name), slotBytes: slotBytes, code: code}
}

// unmarkedFile is the text of Badger's error about a file that a process created and did not live to mark as its own.
// The failed attempt has marked it, and it holds nothing: the next one succeeds.
const unmarkedFile = "Create a new file"

func openBadger(dir string) (*badger.DB, error) {
	options := badgerOptions(dir)
	db, err := badger.Open(options)
	if err != nil && strings.Contains(err.Error(), unmarkedFile) {
		db, err = badger.Open(options)
	}
	if err != nil {
		return nil, fault.New(fault.Unavailable, codeStateUnusable,
			fmt.Sprintf("The state in %s cannot be opened. If another agent uses it, stop that one first.", dir), err)
	}
	return db, nil
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
		// Without it a block that is altered ends an iteration early, without an error.
		WithChecksumVerificationMode(options.OnTableRead).
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
	if !s.copied && s.checkSpace(releasing, 0) != nil && os.Remove(filepath.Join(s.dir, spareName)) != nil {
		// Badger would write a table. All is in its log, which the next start reads.
		return nil
	}
	return s.db.Close()
}

// Identify names the node, whose key signs usage segments. Call it before anything is started.
func (s *Store) Identify(nodeID string, signer protocol.Signer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.d.chain.NodeID != "" && s.d.chain.NodeID != nodeID {
		return fault.New(fault.Conflict, codeStateOfAnotherNode,
			fmt.Sprintf("The state in %s belongs to node %s, not to %s. Give this agent an empty data directory.", s.dir,
				s.d.chain.NodeID, nodeID), nil)
	}
	s.signer = signer
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
	nodeID, signer := s.d.chain.NodeID, s.signer
	s.mu.Unlock()
	if signer == nil {
		return errors.New("state: nothing can be signed before the node is identified")
	}
	return status.RefuseAsOwner(nodeID, signer)
}

// NodeID is the node of Identify, also of an earlier process.
func (s *Store) NodeID() string {
	return view(s, func(d *data) string { return d.chain.NodeID })
}

// Incarnation names this store's life.
func (s *Store) Incarnation() string {
	return view(s, func(d *data) string { return d.meta.Incarnation })
}

// view reads the mirror under the lock.
func view[T any](s *Store, read func(d *data) T) T {
	s.mu.Lock()
	defer s.mu.Unlock()
	return read(&s.d)
}

// Subscribe returns a channel that wakes after each accepted document.
func (s *Store) Subscribe() <-chan struct{} { return s.changed.Subscribe() }

// rootCause is the innermost error, whose text names no path a second time.
func rootCause(err error) error {
	if p, is := errors.AsType[*os.PathError](err); is {
		return p.Err
	}
	return err
}

// CollectGarbage frees the disk space of overwritten values. Call it periodically; it does nothing on a full disk,
// because it needs space itself.
func (s *Store) CollectGarbage() error {
	s.mu.Lock()
	db, idle := s.db, s.closed || s.copied || s.checkSpace(acquiring, 0) != nil
	tables := 0
	if !idle {
		tables = db.Levels()[0].NumTables
	}
	flatten := tables >= compactAt || tables > 0 && time.Since(s.flattenedAt) > flattenAfter
	if flatten {
		s.flattenedAt = time.Now()
	}
	s.mu.Unlock()
	if idle {
		return nil
	}
	if flatten {
		if err := db.Flatten(1); err != nil {
			return err
		}
	}
	for {
		err := db.RunValueLogGC(0.5)
		if errors.Is(err, badger.ErrNoRewrite) || errors.Is(err, badger.ErrRejected) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
