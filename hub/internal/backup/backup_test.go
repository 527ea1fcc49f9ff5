package backup_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/backup"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const passphrase = "correct horse battery"

// dataDir is a hub's data directory with something of everything.
func dataDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, mode := range map[string]os.FileMode{
		"trust/hub-id": 0o644, "trust/state-1.key": 0o600, "kek.key": 0o600, "admin-token": 0o600, "ca.pem": 0o644,
		"registry/docker/blobs/sha256/aa/data": 0o644, "registry/docker/_uploads/1/data": 0o644, "postgres/data/base": 0o600,
	} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(name), mode))
	}
	return dir
}

// filled is a database with rows that refer to each other, and texts that COPY has to escape.
func filled(t *testing.T) *db.DB {
	t.Helper()
	d := dbtest.New(t)
	_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (int, error) {
		org := iam.Org{ID: db.NewID(), Slug: "acme", DisplayName: "tab\tline\nback\\slash \\N", CreatedAt: time.Now()}
		if err := iam.CreateOrg(t.Context(), tx, org); err != nil {
			return 0, err
		}
		_, err := iam.CreateProject(t.Context(), tx, iam.Project{
			ID: db.NewID(), OrgID: org.ID, Slug: "main",
			DisplayName: "Main", CreatedAt: time.Now(),
		})
		return 0, err
	})
	require.NoError(t, err)
	return d
}

func source(t *testing.T) backup.Source {
	return backup.Source{
		ID: db.NewID(), DB: filled(t), DataDir: dataDir(t), HubID: "h1", Release: "test",
		Passphrase: passphrase, ScryptWorkFactor: 8, Now: time.Now(),
	}
}

func target(t *testing.T) backup.Target {
	t.Helper()
	return backup.Target{
		DataDir: filepath.Join(t.TempDir(), "data"), Passphrase: passphrase,
		Database: func(ctx context.Context) (*db.DB, error) {
			d, err := db.Open(ctx, dbtest.EmptyURL(t))
			if err == nil {
				t.Cleanup(d.Close)
			}
			return d, err
		},
		Finish: func(context.Context, *db.DB, backup.Header, string) error { return nil },
	}
}

// dump is everything that the database holds.
func dump(t *testing.T, d *db.DB) map[string]string {
	t.Helper()
	out := map[string]string{}
	require.NoError(t, db.WithDump(t.Context(), d, func(s *db.Dump) error {
		for _, table := range s.Tables {
			var rows bytes.Buffer
			if _, err := s.Copy(t.Context(), table, &rows); err != nil {
				return err
			}
			out[table.Name] = rows.String()
		}
		return nil
	}))
	return out
}

// The file may be copied and its passphrase guessed at for years. Nothing is written under a short one.
func TestABackupWithAShortPassphraseIsRefused(t *testing.T) {
	s := source(t)
	s.Passphrase = strings.Repeat("p", trust.MinPassphraseBytes-1)
	dir := t.TempDir()
	_, err := backup.Make(t.Context(), s, filepath.Join(dir, "hub.age"))
	require.EqualValues(t, "passphrase_short", fault.As(err).Code)
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
	s.Passphrase += "p"
	_, err = backup.Make(t.Context(), s, filepath.Join(dir, "hub.age"))
	require.NoError(t, err)
}

func TestARestoredHubIsTheHubThatWasBackedUp(t *testing.T) {
	s, to := source(t), target(t)
	file := filepath.Join(t.TempDir(), "hub.age")
	made, err := backup.Make(t.Context(), s, file)
	require.NoError(t, err)
	info, err := os.Stat(file)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())
	require.Equal(t, info.Size(), made.SizeBytes)
	sealed, err := os.ReadFile(file)
	require.NoError(t, err)
	require.NotContains(t, string(sealed), "kek.key")

	var restored *db.DB
	to.Finish = func(_ context.Context, d *db.DB, h backup.Header, trustDir string) error {
		restored = d
		require.Equal(t, made.Header, h)
		require.FileExists(t, filepath.Join(trustDir, "hub-id"))
		require.NoDirExists(t, filepath.Join(to.DataDir, "trust"), "no hub could start from half a restore")
		require.Equal(t, dump(t, s.DB), dump(t, d))
		return nil
	}
	_, err = backup.Restore(t.Context(), to, file)
	require.NoError(t, err)
	require.NotNil(t, restored)
	for name, mode := range map[string]os.FileMode{
		"trust/hub-id": 0o644, "trust/state-1.key": 0o600, "kek.key": 0o600,
		"admin-token": 0o600, "registry/docker/blobs/sha256/aa/data": 0o644,
	} {
		content, err := os.ReadFile(filepath.Join(to.DataDir, name))
		require.NoError(t, err)
		require.Equal(t, name, string(content))
		info, err := os.Stat(filepath.Join(to.DataDir, name))
		require.NoError(t, err)
		require.Equal(t, mode, info.Mode(), name)
	}
	require.NoDirExists(t, filepath.Join(to.DataDir, "postgres"), "rows, not the database's own files")
	require.NoDirExists(t, filepath.Join(to.DataDir, "registry/docker/_uploads"))
}

// TestARegistryOnAnotherFileSystemIsInTheBackup: it is restored below the data directory.
func TestARegistryOnAnotherFileSystemIsInTheBackup(t *testing.T) {
	s, to := source(t), target(t)
	elsewhere := filepath.Join(t.TempDir(), "blobs")
	require.NoError(t, os.Rename(filepath.Join(s.DataDir, "registry"), elsewhere))
	s.RegistryDir = elsewhere
	file := filepath.Join(t.TempDir(), "hub.age")
	_, err := backup.Make(t.Context(), s, file)
	require.NoError(t, err)
	to.Finish = func(context.Context, *db.DB, backup.Header, string) error { return nil }
	_, err = backup.Restore(t.Context(), to, file)
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(to.DataDir, "registry/docker/blobs/sha256/aa/data"))
}

// What is not whole restores nothing, and says so.
func TestWhatIsNotAWholeBackupIsRefused(t *testing.T) {
	s := source(t)
	file := filepath.Join(t.TempDir(), "hub.age")
	_, err := backup.Make(t.Context(), s, file)
	require.NoError(t, err)
	whole, err := os.ReadFile(file)
	require.NoError(t, err)
	altered := func(at int) []byte {
		out := bytes.Clone(whole)
		out[at] ^= 1
		return out
	}
	for name, c := range map[string]struct {
		content    []byte
		passphrase string
		code       string
	}{
		"another passphrase":     {whole, "something else", "passphrase_wrong"},
		"altered at the front":   {altered(300), passphrase, "backup_damaged"},
		"altered in the middle":  {altered(len(whole) / 2), passphrase, "backup_damaged"},
		"altered at the end":     {altered(len(whole) - 1), passphrase, "backup_damaged"},
		"cut off by a byte":      {whole[:len(whole)-1], passphrase, "backup_damaged"},
		"cut off in the middle":  {whole[:len(whole)/2], passphrase, "backup_damaged"},
		"something else":         {[]byte("not a backup"), passphrase, "backup_damaged"},
		"empty":                  {nil, passphrase, "backup_damaged"},
		"lengthened by a letter": {append(bytes.Clone(whole), 'x'), passphrase, "backup_damaged"},
	} {
		to := target(t)
		to.Passphrase = c.passphrase
		bad := filepath.Join(t.TempDir(), "bad.age")
		require.NoError(t, os.WriteFile(bad, c.content, 0o600))
		_, err := backup.Restore(t.Context(), to, bad)
		require.Error(t, err, name)
		require.EqualValues(t, c.code, fault.As(err).Code, name)
		require.NoDirExists(t, to.DataDir, name)
	}
}

func TestABackupGoesIntoNothingThatHoldsSomething(t *testing.T) {
	s := source(t)
	file := filepath.Join(t.TempDir(), "hub.age")
	_, err := backup.Make(t.Context(), s, file)
	require.NoError(t, err)
	_, err = backup.Make(t.Context(), s, file)
	require.EqualValues(t, "backup_exists", fault.As(err).Code)

	to := target(t)
	to.DataDir = s.DataDir
	_, err = backup.Restore(t.Context(), to, file)
	require.EqualValues(t, "data_dir_not_empty", fault.As(err).Code)

	to = target(t)
	to.Database = func(context.Context) (*db.DB, error) { return dbtest.New(t), nil }
	_, err = backup.Restore(t.Context(), to, file)
	require.EqualValues(t, "database_not_empty", fault.As(err).Code)
	require.NoDirExists(t, filepath.Join(to.DataDir, "trust"))
	to.Database = target(t).Database
	_, err = backup.Restore(t.Context(), to, file)
	require.NoError(t, err, "the right database needs no other directory")
}
