package managed

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/durable"
)

// prepare makes the data directory if it is new, and writes the settings, which follow this program's version and not
// the one that made the directory.
func (s *Server) prepare(ctx context.Context) error {
	for _, dir := range []string{s.layout.data, s.layout.socket} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return unusable("The directory "+dir+" cannot be made", err)
		}
		if err := s.user.own(dir); err != nil {
			return unusable("The directory "+dir+" cannot be given to user "+s.user.name, err)
		}
	}
	if s.recorded == 0 {
		if err := s.create(ctx); err != nil {
			return err
		}
	}
	return s.configure()
}

// recordedMajor reads which engine the directory was made for; 0 for a new one.
func (s *Server) recordedMajor() (int, error) {
	raw, err := os.ReadFile(filepath.Join(s.layout.root, engineFile))
	if os.IsNotExist(err) {
		return 0, nil
	}
	if err != nil {
		return 0, unusable("The engine file in "+s.layout.root+" cannot be read", err)
	}
	engine, version, _ := strings.Cut(strings.TrimSpace(string(raw)), " ")
	major, err := strconv.Atoi(version)
	if engine != "postgresql" || err != nil {
		return 0, refuse(codeDatabaseEngine, fmt.Sprintf("The data in %s was made by another engine than this hub can run "+
			"(%s names it): run the hub that made it, or give this one another --data-dir.", s.layout.root,
			filepath.Join(s.layout.root, engineFile)), err)
	}
	return major, nil
}

// create runs initdb. The engine file is written last: a directory without it was cut short and is made anew.
func (s *Server) create(ctx context.Context) error {
	if err := clearDir(s.layout.data); err != nil {
		return unusable("The unfinished database in "+s.layout.data+" cannot be removed", err)
	}
	args := []string{
		"--pgdata", s.layout.data, "--username", role, "--encoding", "UTF8", "--locale", "C", "--auth-local",
		"peer", "--auth-host", "reject", "--data-checksums",
	}
	if s.conf.Settings["fsync"] == "off" {
		args = append(args, "--no-sync")
	}
	cmd := exec.CommandContext(ctx, filepath.Join(s.bin, "initdb"), args...)
	cmd.Dir = s.layout.root
	cmd.Env = childEnv()
	cmd.SysProcAttr = s.user.attributes()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return refuse(codeDatabaseInitFailed, "PostgreSQL could not make its database in "+s.layout.data+": "+
			lastLine(out.String()), err)
	}
	major, err := majorVersion(s.layout.data)
	if err != nil {
		return refuse(codeDatabaseInitFailed, "The version of the new database cannot be read.", err)
	}
	path := filepath.Join(s.layout.root, engineFile)
	if err := durable.Replace(path, fmt.Appendf(nil, "postgresql %d\n", major), 0o600); err != nil {
		return unusable("The file "+path+" cannot be written", err)
	}
	return nil
}

// configure writes who may connect and how the server runs. Peer authentication: the kernel says which user is at the
// other end of the socket, so there is no password to keep.
func (s *Server) configure() error {
	settings := map[string]string{ //nolint:gosec // password_encryption names a method
		"listen_addresses":               "",
		"unix_socket_directories":        s.layout.socket,
		"unix_socket_permissions":        "0700",
		"max_connections":                "100",
		"password_encryption":            "scram-sha-256",
		"timezone":                       "UTC",
		"log_timezone":                   "UTC",
		"log_min_messages":               "warning",
		"log_min_error_statement":        "panic", // a failing statement may carry what must not be in a log
		"log_parameter_max_length":       "0",
		"restart_after_crash":            "on",
		"default_transaction_deferrable": "off",
		// Plans follow the sizes of tables: those of a new hub are made for empty ones, and would read whole indexes.
		"autovacuum_naptime": "5s",
		// As many locks as a command's reads need: fewer become locks of pages and tables, which conflict with all others.
		"max_pred_locks_per_transaction": "1024",
		"max_pred_locks_per_page":        "64",
	}
	maps.Copy(settings, s.conf.Settings)
	var conf strings.Builder
	conf.WriteString("# Written by the hub at every start.\n")
	for _, key := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&conf, "%s = '%s'\n", key, strings.ReplaceAll(settings[key], "'", "''"))
	}
	files := map[string]string{
		"postgresql.conf": conf.String(),
		"pg_hba.conf":     "# Written by the hub at every start.\nlocal all all peer map=hub\n",
		"pg_ident.conf": fmt.Sprintf("# Written by the hub at every start.\nhub %s %s\nhub root %s\n", s.user.name, role,
			role),
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		path := filepath.Join(s.layout.data, name)
		if err := os.WriteFile(path, []byte(files[name]), 0o600); err != nil {
			return unusable("The file "+path+" cannot be written", err)
		}
		if err := s.user.own(path); err != nil {
			return unusable("The file "+path+" cannot be given to user "+s.user.name, err)
		}
	}
	return nil
}

// findBinaries returns the directory of initdb and postgres: of exactly the recorded major version where there is one,
// otherwise the newest.
func findBinaries(given string, major int) (string, error) {
	var dirs []string
	if given != "" {
		dirs = []string{given}
	} else {
		if p, err := exec.LookPath("postgres"); err == nil {
			if p, err = filepath.EvalSymlinks(p); err == nil {
				dirs = append(dirs, filepath.Dir(p))
			}
		}
		for _, pattern := range []string{
			"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/usr/local/pgsql/bin",
			"/opt/homebrew/opt/postgresql@*/bin",
		} {
			found, _ := filepath.Glob(pattern) // only a malformed pattern fails
			dirs = append(dirs, found...)
		}
	}
	best, bestMajor := "", 0
	for _, dir := range dirs {
		m, ok := binaryMajor(dir)
		if ok && m > bestMajor && (major == 0 || m == major) {
			best, bestMajor = dir, m
		}
	}
	switch {
	case best != "":
		return best, nil
	case major != 0:
		return "", refuse(codeDatabaseBinariesMissing, fmt.Sprintf("The database was made by PostgreSQL %d and its "+
			"programs are not installed; on Debian: apt-get install postgresql-%d", major, major), nil)
	case given != "":
		return "", refuse(codeDatabaseBinariesMissing, "There are no postgres and initdb in "+given+".", nil)
	}
	return "", refuse(codeDatabaseBinariesMissing, "PostgreSQL is not installed, and no database URL was given. On "+
		"Debian: apt-get install postgresql (set create_main_cluster = false in /etc/postgresql-common/createcluster.conf "+
		"first, if no server of its own is wanted).", nil)
}

func binaryMajor(dir string) (int, bool) {
	if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
		return 0, false
	}
	// No shell, no arguments from outside: the directory is the operator's or the system's.
	out, err := exec.Command(filepath.Join(dir, "postgres"), "--version").Output() //nolint:noctx // answers at once
	if err != nil {
		return 0, false
	}
	fields := strings.Fields(string(out)) // "postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)"
	if len(fields) < 3 {
		return 0, false
	}
	text, _, _ := strings.Cut(fields[2], ".")
	m, err := strconv.Atoi(strings.TrimRightFunc(text, func(r rune) bool { return r < '0' || r > '9' }))
	return m, err == nil
}

func majorVersion(data string) (int, error) {
	raw, err := os.ReadFile(filepath.Join(data, "PG_VERSION"))
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(raw)))
}

func clearDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// childEnv keeps the operator's PG* variables and locale away from the private server.
func childEnv() []string {
	return []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "TZ=UTC"}
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return lines[len(lines)-1]
}
