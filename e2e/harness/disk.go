package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/stretchr/testify/require"
)

// CopyDisk copies a stopped agent's data directory, keys and all, as an image of the disk would have it.
func (w *Testbed) CopyDisk(from, to string) {
	w.T.Helper()
	require.NoError(w.T, os.RemoveAll(to))
	require.NoError(w.T, os.MkdirAll(filepath.Dir(to), 0o700))
	out, err := exec.Command("cp", "-a", from, to).CombinedOutput()
	require.NoError(w.T, err, "%s", out)
}

// SmallDisk mounts a file system of that many MiB over dir.
func (w *Testbed) SmallDisk(dir string, mib int) {
	w.T.Helper()
	require.NoError(w.T, os.MkdirAll(dir, 0o711))
	require.NoError(w.T, syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%dm,mode=711", mib)))
	w.T.Cleanup(func() { require.NoError(w.T, syscall.Unmount(dir, syscall.MNT_DETACH)) })
}

// Fill leaves that many bytes of the directory's file system; removing the file that it returns gives the rest back.
func (w *Testbed) Fill(dir string, leave uint64) string {
	w.T.Helper()
	path := filepath.Join(dir, "ballast")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	require.NoError(w.T, err)
	size := int64(0)
	for first := true; ; first = false {
		var st syscall.Statfs_t
		require.NoError(w.T, syscall.Statfs(dir, &st))
		free := st.Bavail * uint64(st.Bsize)
		if first {
			require.Greater(w.T, free, leave)
		}
		if free <= leave {
			break
		}
		take := int64(free - leave)
		err := syscall.Fallocate(int(f.Fd()), 0, size, take)
		// Others write there too: what was free may be theirs by now.
		if !errors.Is(err, syscall.ENOSPC) {
			require.NoError(w.T, err)
			size += take
		}
	}
	require.NoError(w.T, f.Close())
	return path
}

// moving are the tables that change by themselves while a hub serves and a node is connected, and the audit trail,
// which has a row for each refusal.
func moving() []string {
	return []string{
		"audit_heads", "audit_rows", "node_sessions", "event_sequencer", "instance_reports", "hub_lease", "usage_slots",
	}
}

// Rows is the content of every other table of the hub.
func (w *Testbed) Rows() map[string]string {
	w.T.Helper()
	db := w.Database()
	var names []string
	require.NoError(w.T,
		db.QueryRow(w.Ctx,
			`SELECT array_agg(table_name::text) FROM information_schema.tables WHERE table_schema = 'public'
				AND NOT table_name = ANY($1)`, moving()).Scan(&names))
	require.NotEmpty(w.T, names)
	content := map[string]string{}
	for _, name := range names {
		var count int
		var hash string
		// The name comes from the catalogue of the database itself.
		// An event's place in the sequence is written a moment after the event.
		sql := fmt.Sprintf(
			`SELECT count(*), coalesce(md5(string_agg(md5(t::text), '' ORDER BY md5(t::text))), '')
				FROM (SELECT to_jsonb(r) - 'pos' FROM %q r) t`, name)
		require.NoError(w.T, db.QueryRow(w.Ctx, sql).Scan(&count, &hash))
		content[name] = fmt.Sprintf("%d rows %s", count, hash)
	}
	require.NoError(w.T, db.Close(w.Ctx))
	return content
}

// TablesWith names the tables of the hub with a row that holds the text, also inside binary values.
func (w *Testbed) TablesWith(text string) (found []string) {
	w.T.Helper()
	db := w.Database()
	var names []string
	require.NoError(w.T, db.QueryRow(w.Ctx,
		`SELECT array_agg(table_name::text) FROM information_schema.tables WHERE table_schema = 'public'`).Scan(&names))
	for _, name := range names {
		var there bool
		// The name comes from the catalogue of the database itself.
		sql := fmt.Sprintf(`SELECT EXISTS (SELECT 1 FROM %q r WHERE strpos(to_jsonb(r)::text, $1) > 0
			OR strpos(to_jsonb(r)::text, encode(convert_to($1, 'UTF8'), 'hex')) > 0)`, name)
		require.NoError(w.T, db.QueryRow(w.Ctx, sql, text).Scan(&there))
		if there {
			found = append(found, name)
		}
	}
	require.NoError(w.T, db.Close(w.Ctx))
	return found
}
