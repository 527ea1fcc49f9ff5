// Package backup writes, checks and restores the backup of a hub: one consistent snapshot of the database, the hub's
// online keys and trust bundles, the key-encryption key and the registry, but not the root and catalog keys, which the
// hub does not have. What a restored hub may do before its nodes have uploaded their states is package recovery's.
//
// The file is age (age-encryption.org/v1) with a passphrase, over a tar archive: backup.json, the files, the tables in
// PostgreSQL's COPY text, end.json with the SHA-256 of all contents. Age detects altered or missing bytes, end.json an
// unfinished archive.
package backup

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	format = 1
	// chunkBytes is the size of an entry with a part of a table: tar needs the size before the content.
	chunkBytes = 4 << 20
	// maxJSONBytes bounds the two descriptions.
	maxJSONBytes = 4 << 20

	headerName   = "backup.json"
	endName      = "end.json"
	filesPrefix  = "files/"
	tablesPrefix = "tables/"
	registryDir  = "registry"
)

// Header describes a backup.
type Header struct {
	Format  int       `json:"format"`
	ID      string    `json:"id"`
	TakenAt time.Time `json:"taken_at"`
	Release string    `json:"release"`
	HubID   string    `json:"hub_id"`
	// Migrations are the applied migrations of the database.
	Migrations []int64    `json:"migrations"`
	Tables     []db.Table `json:"tables"`
	// Registry is true where the backup holds the registry's content.
	Registry bool `json:"registry"`
}

// end is the last entry of the archive.
type end struct {
	Entries int              `json:"entries"`
	Rows    map[string]int64 `json:"rows"`
	SHA256  string           `json:"sha256"`
}

// Source is what a backup is made of.
type Source struct {
	// ID names the backup.
	ID      string
	DB      *db.DB
	DataDir string
	// RegistryDir holds the registry's content; empty means registry below DataDir.
	RegistryDir string
	HubID       string
	Release     string
	// WithoutRegistry leaves the registry's content out, for operators that keep it elsewhere.
	WithoutRegistry bool
	Passphrase      string
	// ScryptWorkFactor is log2 of the work for one guess of the passphrase; 0 takes age's default.
	ScryptWorkFactor int
	Now              time.Time
	// InSnapshot is called inside the snapshot of the database; may be nil.
	InSnapshot func(ctx context.Context, tx db.Tx) error
}

func (s Source) registryPath() string {
	if s.RegistryDir != "" {
		return s.RegistryDir
	}
	return filepath.Join(s.DataDir, registryDir)
}

// Made is a backup that was read back and found whole.
type Made struct {
	Header
	SizeBytes int64
}

// Make writes a backup to a new file, mode 0600, synced, and reads it back before it gets its name.
func Make(ctx context.Context, s Source, path string) (Made, error) {
	if err := trust.CheckPassphrase(s.Passphrase); err != nil {
		return Made{}, err
	}
	if _, err := os.Lstat(path); err == nil {
		return Made{}, fault.New(fault.Conflict, codeBackupExists, path+" exists already: a backup never overwrites another "+
			"one.", nil)
	}
	unfinished := path + ".unfinished"
	if err := s.write(ctx, unfinished); err != nil {
		return Made{}, errors.Join(writeTrouble(path, err), ignoreAbsent(os.Remove(unfinished)))
	}
	// Nodes may delete usage that is in a backup only once it has been read back as a restore would.
	header, err := Check(unfinished, s.Passphrase)
	if err != nil {
		return Made{}, errors.Join(fault.New(fault.Internal, codeBackupNotVerified, "The backup that was written to "+path+
			" cannot be read back: check the disk.", err), ignoreAbsent(os.Remove(unfinished)))
	}
	info, err := os.Stat(unfinished)
	if err != nil {
		return Made{}, writeTrouble(path, err)
	}
	if err := os.Rename(unfinished, path); err != nil {
		return Made{}, writeTrouble(path, err)
	}
	return Made{Header: header, SizeBytes: info.Size()}, durable.SyncDir(filepath.Dir(path))
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func writeTrouble(path string, err error) error {
	var known *fault.Error
	switch {
	case errors.As(err, &known):
		return err
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fault.New(fault.Unavailable, fault.CodeDiskFull, "The disk of "+path+" is full: nothing was left there; "+
			"free some "+
			"space or take another one.", err)
	}
	return fault.New(fault.Internal, codeBackupNotWritten, "The backup could not be written to "+path+": "+err.Error()+".",
		err)
}

func (s Source) write(ctx context.Context, path string) (err error) {
	// A power cut may have left the file of an earlier attempt.
	if err := ignoreAbsent(os.Remove(path)); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	sealed, err := trust.Encrypt(f, s.Passphrase, s.ScryptWorkFactor)
	if err != nil {
		return err
	}
	if err := s.archive(ctx, sealed); err != nil {
		return err
	}
	if err := sealed.Close(); err != nil {
		return err
	}
	return f.Sync()
}

// archive writes the entries in the order of a restore. The database comes before the registry: an image is pushed
// before a row names it, and content is never rewritten.
func (s Source) archive(ctx context.Context, to io.Writer) error {
	files, err := hubFiles(s.DataDir)
	if err != nil {
		return err
	}
	a := &archiver{tar: tar.NewWriter(to), sum: sha256.New(), now: s.Now, rows: map[string]int64{}}
	err = db.WithDump(ctx, s.DB, func(d *db.Dump) error {
		header := Header{
			Format: format, ID: s.ID, TakenAt: s.Now.UTC().Truncate(time.Microsecond), Release: s.Release, HubID: s.HubID,
			Migrations: d.Versions, Tables: d.Tables, Registry: !s.WithoutRegistry,
		}
		if err := a.json(headerName, header); err != nil {
			return err
		}
		for _, f := range files {
			if err := a.bytes(filesPrefix+f.name, f.data, f.mode); err != nil {
				return err
			}
		}
		for _, t := range d.Tables {
			if err := a.table(ctx, d, t); err != nil {
				return err
			}
		}
		if s.InSnapshot == nil {
			return nil
		}
		return s.InSnapshot(ctx, d)
	})
	if err != nil {
		return err
	}
	if !s.WithoutRegistry {
		if err := a.tree(s.registryPath(), registryDir); err != nil {
			return err
		}
	}
	if err := a.json(endName, end{
		Entries: a.entries, Rows: a.rows,
		SHA256: hex.EncodeToString(a.sum.Sum(nil)),
	}); err != nil {
		return err
	}
	return a.tar.Close()
}

// archiver writes entries and hashes their names and contents.
type archiver struct {
	tar     *tar.Writer
	sum     hash.Hash
	now     time.Time
	entries int
	rows    map[string]int64
}

func (a *archiver) begin(name string, size int64, mode fs.FileMode) error {
	a.entries++
	_, _ = fmt.Fprintf(a.sum, "%s %d\n", name, size)
	return a.tar.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: name, Size: size, Mode: int64(mode.Perm()),
		ModTime: a.now,
	})
}

func (a *archiver) bytes(name string, data []byte, mode fs.FileMode) error {
	if err := a.begin(name, int64(len(data)), mode); err != nil {
		return err
	}
	_, err := io.MultiWriter(a.tar, a.sum).Write(data)
	return err
}

func (a *archiver) json(name string, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return a.bytes(name, data, 0o600)
}

// table writes the rows in pieces; a table without rows has none.
func (a *archiver) table(ctx context.Context, d *db.Dump, t db.Table) error {
	pieces := &pieces{a: a, name: tablesPrefix + t.Name}
	rows, err := d.Copy(ctx, t, pieces)
	if err != nil {
		return err
	}
	a.rows[t.Name] = rows
	return pieces.flush()
}

// pieces cuts a stream into entries.
type pieces struct {
	a    *archiver
	name string
	no   int
	held []byte
}

// Write implements io.Writer.
func (p *pieces) Write(data []byte) (int, error) {
	p.held = append(p.held, data...)
	if len(p.held) >= chunkBytes {
		return len(data), p.flush()
	}
	return len(data), nil
}

func (p *pieces) flush() error {
	if len(p.held) == 0 {
		return nil
	}
	p.no++
	err := p.a.bytes(fmt.Sprintf("%s/%06d", p.name, p.no), p.held, 0o600)
	p.held = p.held[:0]
	return err
}

// tree writes the files below root, with names below dir. Unfinished uploads are left out.
func (a *archiver) tree(root, dir string) error {
	return filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if entry.Name() == "_uploads" {
				return fs.SkipDir
			}
			return nil
		}
		if !entry.Type().IsRegular() {
			return nil
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		return a.file(filesPrefix+dir+"/"+filepath.ToSlash(name), path)
	})
}

func (a *archiver) file(name, path string) (err error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // removed since
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := a.begin(name, info.Size(), info.Mode()); err != nil {
		return err
	}
	_, err = io.CopyN(io.MultiWriter(a.tar, a.sum), f, info.Size())
	return err
}

// hubFile is a small file of the data directory, held in memory.
type hubFile struct {
	name string
	data []byte
	mode fs.FileMode
}

// maxHubFiles and maxHubFileBytes are far above what a hub has.
const (
	maxHubFiles     = 4096
	maxHubFileBytes = 1 << 20
	readTries       = 8
)

// hubFiles reads keys, bundles and the other small files. `gpuaas-hub trust revoke` may run meanwhile: it adds a key,
// then the bundle that names it, then removes the old key. hubFiles starts again where the names differ afterwards.
func hubFiles(dataDir string) ([]hubFile, error) {
	for range readTries {
		before, err := hubFileNames(dataDir)
		if err != nil {
			return nil, err
		}
		files, err := readAll(dataDir, before)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		after, nameErr := hubFileNames(dataDir)
		if nameErr != nil {
			return nil, nameErr
		}
		if err == nil && strings.Join(before, "\n") == strings.Join(after, "\n") {
			return files, nil
		}
	}
	return nil, fault.New(fault.Conflict, codeKeysChanging, "The hub's keys are being changed; make the backup when that "+
		"is done.", nil)
}

func hubFileNames(dataDir string) ([]string, error) {
	var names []string
	for _, one := range []string{"ca.pem", "kek.key", "admin-token"} {
		if _, err := os.Lstat(filepath.Join(dataDir, one)); err == nil {
			names = append(names, one)
		}
	}
	entries, err := os.ReadDir(filepath.Join(dataDir, "trust"))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if e.Type().IsRegular() {
			names = append(names, "trust/"+e.Name())
		}
	}
	if len(names) > maxHubFiles {
		return nil, fmt.Errorf("%d files in %s", len(names), dataDir)
	}
	return names, nil
}

func readAll(dataDir string, names []string) ([]hubFile, error) {
	out := make([]hubFile, 0, len(names))
	for _, name := range names {
		path := filepath.Join(dataDir, filepath.FromSlash(name))
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		if info.Size() > maxHubFileBytes {
			return nil, fmt.Errorf("%s has %d bytes, which is no key, bundle or token", path, info.Size())
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		out = append(out, hubFile{name, data, info.Mode()})
	}
	return out, nil
}
