package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// What is posted while a backup is made is not in it: the nodes keep it until it is in the next one.
func TestLaw16UsageThatIsPostedDuringABackupIsNotInIt(t *testing.T) {
	h := newHome(t)
	url, file := dbtest.PrivateURL(t), filepath.Join(h.dir, "database-url")
	require.NoError(t, os.WriteFile(file, []byte(url), 0o600))
	ctx := t.Context()
	conn, err := pgx.Connect(ctx, url)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(ctx)) }()
	exec := func(sql string, args ...any) {
		_, err := conn.Exec(ctx, sql, args...)
		require.NoError(t, err)
	}
	node := db.NewID()
	exec(`INSERT INTO usage_watermarks (node_id, incarnation, number, sha256, updated_at)
		VALUES ($1, 'i1', 5, '', now()), ($1, 'i2', 1, '', now())`, node)

	// The backup takes its snapshot, and then waits for the table.
	exec(`BEGIN`)
	exec(`LOCK TABLE prices IN ACCESS EXCLUSIVE MODE`)
	made := make(chan error, 1)
	go func() {
		_, err := cli(t, "backup", filepath.Join(h.dir, "backup"), "--data-dir", h.data, "--database-url-file", file,
			"--passphrase-file", h.passphrase, "--without-registry")
		made <- err
	}()
	require.Eventually(t, func() bool {
		var waiting bool
		require.NoError(t, conn.QueryRow(ctx, `SELECT EXISTS (SELECT 1 FROM pg_locks
			WHERE relation = 'prices'::regclass AND NOT granted)`).Scan(&waiting))
		return waiting
	}, time.Minute, 10*time.Millisecond)
	exec(`UPDATE usage_watermarks SET number = 7 WHERE node_id = $1 AND incarnation = 'i1'`, node)
	exec(`COMMIT`)
	require.NoError(t, <-made)
	rows, err := conn.Query(ctx, `SELECT archived FROM usage_watermarks WHERE node_id = $1 ORDER BY incarnation`, node)
	require.NoError(t, err)
	archived, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(t, err)
	require.Equal(t, []int64{5, 1}, archived)
}

// The bundle of a backup from before a rotation of the root is signed by the old root alone.
func TestARestoreWithTheRootOfAfterTheBackupChangesNothing(t *testing.T) {
	h := newHome(t)
	file, made := filepath.Join(h.dir, "database-url"), filepath.Join(h.dir, "backup")
	require.NoError(t, os.WriteFile(file, []byte(dbtest.PrivateURL(t)), 0o600))
	_, err := cli(t, "backup", made, "--data-dir", h.data, "--database-url-file", file, "--passphrase-file", h.passphrase)
	require.NoError(t, err)
	old := filepath.Join(h.dir, "old-root.age")
	root, err := os.ReadFile(filepath.Join(h.keys, trust.RootKeyFile))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(old, root, 0o600))
	_, err = cli(t, "trust", "rotate-root", "--data-dir", h.data, "--key-dir", h.keys, "--passphrase-file", h.passphrase)
	require.NoError(t, err)

	restored, empty := filepath.Join(h.dir, "restored"), filepath.Join(h.dir, "empty-url")
	require.NoError(t, os.WriteFile(empty, []byte(dbtest.EmptyURL(t)), 0o600))
	restore := func(args ...string) error {
		_, err := cli(t, append([]string{
			"restore", made, "--data-dir", restored, "--database-url-file", empty, "--passphrase-file", h.passphrase,
			"--root-passphrase-file", h.passphrase,
		}, args...)...)
		return err
	}
	err = restore("--key-dir", h.keys)
	require.EqualValues(t, "root_key_wrong", fault.As(err).Code, "%v", err)
	require.Contains(t, fault.As(err).Public, h.fingerprint)
	require.NoDirExists(t, restored)
	require.NoError(t, restore("--root-key-file", old))
}

// Who practises a restore on a new machine installs PostgreSQL when the restore says that it is missing.
func TestARestoreThatFoundNoDatabaseCanBeRepeated(t *testing.T) {
	h := newHome(t)
	file, made := filepath.Join(h.dir, "database-url"), filepath.Join(h.dir, "backup")
	require.NoError(t, os.WriteFile(file, []byte(dbtest.PrivateURL(t)), 0o600))
	_, err := cli(t, "backup", made, "--data-dir", h.data, "--database-url-file", file, "--passphrase-file", h.passphrase)
	require.NoError(t, err)
	restore := func(args ...string) error {
		_, err := cli(t, append([]string{
			"restore", made, "--data-dir", filepath.Join(h.dir, "restored"), "--passphrase-file", h.passphrase, "--keep-epoch",
		}, args...)...)
		return err
	}
	err = restore("--postgres-bin-dir", h.dir)
	require.EqualValues(t, "database_binaries_missing", fault.As(err).Code, "%v", err)
	require.NoError(t, os.WriteFile(file, []byte(dbtest.EmptyURL(t)), 0o600))
	require.NoError(t, restore("--database-url-file", file))
}

// A restore takes long and fills an empty directory: a passphrase that was mistyped must not cost another one.
func TestARestoreWithAWrongRootPassphraseMakesNothing(t *testing.T) {
	h := newHome(t)
	file := func(name, content string) string {
		path := filepath.Join(h.dir, name)
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		return path
	}
	backup := filepath.Join(h.dir, "backup")
	_, err := cli(t, "backup", backup, "--data-dir", h.data, "--database-url-file", file("old", dbtest.PrivateURL(t)),
		"--passphrase-file", h.passphrase, "--without-registry")
	require.NoError(t, err)
	data, database := filepath.Join(h.dir, "restored"), file("new", dbtest.EmptyURL(t))
	restore := func(rootPassphrase string) error {
		_, err := cli(t, "restore", backup, "--data-dir", data, "--database-url-file", database, "--passphrase-file",
			h.passphrase, "--key-dir", h.keys, "--root-passphrase-file", rootPassphrase)
		return err
	}
	require.EqualValues(t, "passphrase_wrong", fault.As(restore(file("wrong", "another horse, another battery"))).Code)
	require.NoDirExists(t, data)
	require.NoError(t, restore(h.passphrase))
}
