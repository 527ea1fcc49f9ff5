package backup

import (
	"archive/tar"
	"bytes"
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
	"slices"
	"strings"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func damaged(path string, cause error) error {
	return fault.New(fault.Malformed, codeBackupDamaged, path+" is no whole backup of a hub: it was altered, cut off, or "+
		"never finished. Take another copy.", cause).Permanent()
}

// reader reads the entries of a backup and hashes their names and contents.
type reader struct {
	path    string
	file    *os.File
	tar     *tar.Reader
	sum     hash.Hash
	entries int
	header  Header
}

// open decrypts the file and reads its header.
func open(path, passphrase string) (r *reader, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fault.New(fault.Malformed, codeBackupUnreadable, "The backup "+path+" cannot be read.", err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
		}
	}()
	plain, err := trust.Decrypt(f, path, passphrase, func(cause error) error { return damaged(path, cause) })
	if err != nil {
		return nil, err
	}
	r = &reader{path: path, file: f, tar: tar.NewReader(plain), sum: sha256.New()}
	first, err := r.next()
	if err != nil {
		return nil, err
	}
	if first.Name != headerName {
		return nil, damaged(path, fmt.Errorf("it begins with %q", first.Name))
	}
	if err := r.json(r.content(), &r.header); err != nil {
		return nil, err
	}
	if r.header.Format != format {
		return nil, fault.New(fault.Unprocessable, db.CodeBackupOfNewerRelease, fmt.Sprintf("The backup has form %d, this "+
			"release reads %d.", r.header.Format, format), nil).Permanent()
	}
	return r, nil
}

// next moves to the next entry.
func (r *reader) next() (*tar.Header, error) {
	h, err := r.tar.Next()
	if err != nil {
		return nil, damaged(r.path, err)
	}
	if h.Typeflag != tar.TypeReg || !filepath.IsLocal(filepath.FromSlash(h.Name)) {
		return nil, damaged(r.path, fmt.Errorf("entry %q", h.Name))
	}
	if h.Name != endName {
		r.entries++
		_, _ = fmt.Fprintf(r.sum, "%s %d\n", h.Name, h.Size)
	}
	return h, nil
}

// content reads the current entry and hashes it.
func (r *reader) content() io.Reader { return io.TeeReader(r.tar, r.sum) }

func (r *reader) json(from io.Reader, into any) error {
	data, err := io.ReadAll(io.LimitReader(from, maxJSONBytes))
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		return damaged(r.path, err)
	}
	return nil
}

// finish checks the end entry, and that nothing follows: only at its end does age detect missing bytes.
func (r *reader) finish() error {
	sum := hex.EncodeToString(r.sum.Sum(nil))
	var e end
	if err := r.json(r.tar, &e); err != nil {
		return err
	}
	if e.Entries != r.entries || e.SHA256 != sum {
		return damaged(r.path, fmt.Errorf("%d entries with sum %s, %d with %s were written", r.entries, sum, e.Entries,
			e.SHA256))
	}
	if _, err := r.tar.Next(); !errors.Is(err, io.EOF) {
		return damaged(r.path, fmt.Errorf("something follows the end: %w", err))
	}
	return nil
}

// Check reads all of a backup and returns its header. It fails for one that was altered or cut off anywhere.
func Check(path, passphrase string) (Header, error) {
	header, _, err := check(path, passphrase)
	return header, err
}

// check also returns the public files of the trust directory, by name: its bundles and the root's fingerprint.
func check(path, passphrase string) (Header, map[string][]byte, error) {
	r, err := open(path, passphrase)
	if err != nil {
		return Header{}, nil, err
	}
	defer func() { _ = r.file.Close() }()
	public := map[string][]byte{}
	for {
		h, err := r.next()
		if err != nil {
			return Header{}, nil, err
		}
		if h.Name == endName {
			return r.header, public, r.finish()
		}
		var kept bytes.Buffer
		into := io.Discard
		name, inTrust := strings.CutPrefix(h.Name, filesPrefix+"trust/")
		isPublic := inTrust && !strings.HasSuffix(name, ".key") && h.Size <= maxHubFileBytes
		if isPublic {
			into = &kept
		}
		if _, err := io.Copy(into, r.content()); err != nil {
			return Header{}, nil, damaged(path, err)
		}
		if isPublic {
			public[name] = kept.Bytes()
		}
	}
}

// Target is where Restore writes a backup.
type Target struct {
	// DataDir must not exist, or be empty.
	DataDir    string
	Passphrase string
	// CheckTrust is called once the whole backup was checked, before anything is changed, with a directory that holds the
	// trust bundles of the backup, but no key. May be nil.
	CheckTrust func(trustDir string) error
	// Database opens the empty database for the rows. Restore calls it after it has checked the whole backup and made the
	// data directory.
	Database func(ctx context.Context) (*db.DB, error)
	// Finish is called once all files and rows are restored, before trustDir gets its final name.
	Finish func(ctx context.Context, d *db.DB, h Header, trustDir string) error
}

// Restore checks the whole backup, then fills the data directory and the database, with the backup's schema. The trust
// directory gets its name last, so that after an interrupted restore no hub can start.
func Restore(ctx context.Context, t Target, path string) (Header, error) {
	if err := emptyDir(t.DataDir); err != nil {
		return Header{}, err
	}
	header, public, err := check(path, t.Passphrase)
	if err != nil {
		return Header{}, err
	}
	if err := t.checkTrust(public); err != nil {
		return Header{}, restoreTrouble(t.DataDir, err)
	}
	// Other users may pass through the data directory, but not list it: the private PostgreSQL runs as a user of its own.
	if err := os.MkdirAll(t.DataDir, 0o711); err != nil { //nolint:gosec // see above
		return Header{}, restoreTrouble(t.DataDir, err)
	}
	if err := os.Chmod(t.DataDir, 0o711); err != nil { //nolint:gosec // see above
		return Header{}, restoreTrouble(t.DataDir, err)
	}
	d, err := t.Database(ctx)
	if err == nil {
		err = db.RequireEmpty(ctx, d) // before the hub's keys lie in the data directory
	}
	if err != nil {
		return Header{}, err
	}
	r, err := open(path, t.Passphrase)
	if err != nil {
		return Header{}, err
	}
	defer func() { _ = r.file.Close() }()
	e := &extractor{reader: r, dataDir: filepath.Clean(t.DataDir), dirs: map[string]bool{}}
	if err := e.run(ctx, d); err != nil {
		return Header{}, restoreTrouble(t.DataDir, err)
	}
	unfinished := filepath.Join(t.DataDir, unfinishedTrust)
	if err := t.Finish(ctx, d, header, unfinished); err != nil {
		return Header{}, restoreTrouble(t.DataDir, err)
	}
	if err := os.Rename(unfinished, filepath.Join(t.DataDir, "trust")); err != nil {
		return Header{}, restoreTrouble(t.DataDir, err)
	}
	return header, durable.SyncDir(t.DataDir)
}

// checkTrust calls CheckTrust with a directory of its own.
func (t Target) checkTrust(public map[string][]byte) (err error) {
	if t.CheckTrust == nil {
		return nil
	}
	dir, err := os.MkdirTemp("", "gpuaas-restore-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for name, data := range public {
		if err := os.WriteFile(filepath.Join(dir, filepath.Base(name)), data, 0o600); err != nil {
			return err
		}
	}
	return t.CheckTrust(dir)
}

// emptyDir refuses a directory that is not empty: it may be a hub that is more recent than the backup.
func emptyDir(dir string) error {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return restoreTrouble(dir, err)
	}
	// A restore that found no database has left its lock, and nothing else.
	entries = slices.DeleteFunc(entries, func(e fs.DirEntry) bool { return e.Name() == lockFile })
	if len(entries) > 0 {
		return fault.New(fault.Conflict, codeDataDirNotEmpty, fmt.Sprintf("The data directory %s is not empty (%s lies "+
			"there): a backup is restored into an empty or absent one only.", dir, entries[0].Name()), nil)
	}
	return nil
}

func restoreTrouble(dir string, err error) error {
	if _, ok := errors.AsType[*fault.Error](err); ok {
		return err
	}
	return fault.New(fault.Internal, codeRestoreFailed, "The backup could not be restored to "+dir+": "+err.Error()+
		". Empty the directory and try again.", err)
}

// lockFile is the empty file of the data directory that the processes of a hub lock.
const lockFile = "lock"

// unfinishedTrust is the trust directory's name until everything is there.
const unfinishedTrust = "trust.unfinished"

// extractor writes the entries to the data directory and the database, in the second pass over the backup.
type extractor struct {
	*reader
	dataDir string
	// dirs are those that got an entry.
	dirs map[string]bool
	at   *tar.Header
}

func (e *extractor) run(ctx context.Context, d *db.DB) (err error) {
	if e.at, err = e.next(); err != nil {
		return err
	}
	if err := e.files(); err != nil {
		return err
	}
	if err := db.Load(ctx, d, e.header.Migrations, e.nextTable); err != nil {
		return err
	}
	if err := e.files(); err != nil {
		return err
	}
	if e.at.Name != endName {
		return damaged(e.path, fmt.Errorf("%q where the end was due", e.at.Name))
	}
	for dir := range e.dirs {
		if err := durable.SyncDir(dir); err != nil {
			return err
		}
	}
	return e.finish()
}

// files writes the file entries up to the first entry of another kind.
func (e *extractor) files() (err error) {
	for strings.HasPrefix(e.at.Name, filesPrefix) {
		if err := e.write(strings.TrimPrefix(e.at.Name, filesPrefix)); err != nil {
			return err
		}
		if e.at, err = e.next(); err != nil {
			return err
		}
	}
	return nil
}

func (e *extractor) write(name string) (err error) {
	if rest, is := strings.CutPrefix(name, "trust/"); is {
		name = unfinishedTrust + "/" + rest
	}
	path := filepath.Join(e.dataDir, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	for at := path; at != e.dataDir; {
		at = filepath.Dir(at)
		e.dirs[at] = true
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, fs.FileMode(e.at.Mode).Perm())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if _, err := io.Copy(f, e.content()); err != nil {
		return err
	}
	return f.Sync()
}

// nextTable returns the rows of the next table that has rows.
func (e *extractor) nextTable() (db.Table, io.Reader, bool, error) {
	rest, is := strings.CutPrefix(e.at.Name, tablesPrefix)
	if !is {
		return db.Table{}, nil, false, nil
	}
	name, _, _ := strings.Cut(rest, "/")
	i := slices.IndexFunc(e.header.Tables, func(t db.Table) bool { return t.Name == name })
	if i < 0 {
		return db.Table{}, nil, false, damaged(e.path, fmt.Errorf("table %s is not in the header", name))
	}
	return e.header.Tables[i], &tableRows{e: e, prefix: tablesPrefix + name + "/", now: e.content()}, true, nil
}

// tableRows joins the pieces of one table.
type tableRows struct {
	e      *extractor
	prefix string
	now    io.Reader
}

// Read implements io.Reader.
func (t *tableRows) Read(p []byte) (int, error) {
	for {
		n, err := t.now.Read(p)
		if n > 0 || err == nil {
			return n, nil
		}
		if !errors.Is(err, io.EOF) {
			return 0, err
		}
		if t.e.at, err = t.e.next(); err != nil {
			return 0, err
		}
		if !strings.HasPrefix(t.e.at.Name, t.prefix) {
			return 0, io.EOF
		}
		t.now = t.e.content()
	}
}
