package ledger_test

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/e2e/powerloss"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/db/managed"
)

const (
	cutDiskMiB = 512
	// maxStepsBeforeACut lets some cuts fall into the recovery from the one before, and some into checkpoints.
	maxStepsBeforeACut = 400
)

// TestLaw06NoAnsweredCommitIsLostByAPowerCut cuts the power below a hub's own PostgreSQL at random moments, its
// recoveries included, while four writers post usage and credit, and the audit trail is chained. After each cut, all
// that was answered is there, nothing is there in part, the books balance and each chain of the trail is whole.
func TestLaw06NoAnsweredCommitIsLostByAPowerCut(t *testing.T) {
	disk, random := newCutDisk(t)
	rounds := 8
	if testing.Short() {
		rounds = 3
	}
	promised := promises{}
	for range rounds {
		promised.add(t, disk.cut(t, random, false))
		disk.examine(t, func(w *world) {
			require.Empty(t, promised.lost(w))
			w.checkSteps()
			w.checkBill()
			w.checkTrail(promised)
		})
		require.NoError(t, disk.PowerOn())
	}
}

// A commit that is answered before the log is on the disk is lost by a cut, and the test above would notice. The hub
// refuses a server that answers so early; here each transaction asks for it.
func TestLaw06CommitsWithoutSyncAreSeenToBeLost(t *testing.T) {
	disk, random := newCutDisk(t)
	promised := promises{}
	for round := 1; ; round++ {
		promised.add(t, disk.cut(t, random, true))
		var lost []string
		disk.examine(t, func(w *world) { lost = promised.lost(w) })
		if len(lost) > 0 {
			t.Logf("round %d: %s", round, strings.Join(lost, "; "))
			return
		}
		require.Less(t, round, 8, "nothing is lost")
		require.NoError(t, disk.PowerOn())
	}
}

// cutDisk is a disk with a hub's PostgreSQL.
type cutDisk struct{ *powerloss.Disk }

func newCutDisk(t *testing.T) (cutDisk, *rand.Rand) {
	t.Helper()
	skip.Root(t, "mounts and loop devices")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	// Below /tmp itself: PostgreSQL's user may not pass through the directories of the testing package.
	dir, err := os.MkdirTemp("/tmp", "gpuaas-cut-") //nolint:usetesting // see above
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o711))
	disk, err := powerloss.New(filepath.Join(dir, "disk"), filepath.Join(dir, "p"), cutDiskMiB)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, disk.Close()) })
	return cutDisk{disk}, rand.New(rand.NewPCG(seed, 0))
}

func (d cutDisk) dir() string { return filepath.Join(d.Point, "db") }

// cut runs a hub on the disk, cuts the power at a random moment after some of its steps, and returns what it said.
func (d cutDisk) cut(t *testing.T, random *rand.Rand, early bool) string {
	t.Helper()
	cmd, lines := d.hub(t, early)
	var said strings.Builder
	for range random.IntN(maxStepsBeforeACut) {
		require.True(t, lines.Scan(), "the hub says more")
		said.WriteString(lines.Text() + "\n")
	}
	time.Sleep(time.Duration(random.IntN(20_000)) * time.Microsecond) // the moment within what the hub does next
	var servers []int
	lost, err := d.Cut(random, func() error {
		err := cmd.Process.Kill()
		servers = dbtest.ProcessesIn(d.Point)
		for _, pid := range servers {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		return err
	})
	require.NoError(t, err)
	for lines.Scan() {
		said.WriteString(lines.Text() + "\n")
	}
	require.Error(t, cmd.Wait(), "killed")
	dbtest.RemoveMemory(t, servers)
	t.Logf("%d pages lost, %d bytes said", lost, said.Len())
	return said.String()
}

// hub starts a process that works on the disk until it is killed.
func (d cutDisk) hub(t *testing.T, early bool) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), asHubEnv+"="+d.dir())
	if early {
		cmd.Env = append(cmd.Env, earlyEnv+"=1")
	}
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd, bufio.NewScanner(stdout)
}

// examine opens the database on a copy of the disk, as the next hub would find it.
func (d cutDisk) examine(t *testing.T, check func(w *world)) {
	t.Helper()
	require.NoError(t, d.Examine(func() {
		s, err := managed.Start(t.Context(), managed.Config{Dir: d.dir(), Settings: cutSettings()})
		require.NoError(t, err, "PostgreSQL comes up after the cut")
		defer func() { require.NoError(t, s.Close()) }()
		opened, err := db.Open(t.Context(), s.URL())
		require.NoError(t, err)
		defer opened.Close()
		require.NoError(t, db.Migrate(t.Context(), opened)) // the cut may have been before the first hub had done it
		check(cutWorld(t, opened, 0))
	}))
}

// cutSettings lets checkpoints happen during the test, and keeps all memory that outlives a kill on the disk.
func cutSettings() map[string]string {
	return map[string]string{
		"shared_buffers": "16MB", "max_wal_size": "32MB", "min_wal_size": "32MB", "checkpoint_timeout": "30s",
		"dynamic_shared_memory_type": "mmap",
	}
}

// promises are what the hubs said: the last step of each writer that was answered, and the hashes of the audit trail
// by org and number.
type promises map[string]string

func (p promises) add(t *testing.T, said string) {
	t.Helper()
	for line := range strings.Lines(said) {
		what, value, found := strings.Cut(strings.TrimSpace(line), " = ")
		require.True(t, found, line)
		before, known := p[what]
		if known && strings.HasPrefix(what, "hash") {
			require.Equal(t, before, value, "the trail has another %s", what)
		}
		p[what] = value
	}
}

// lost lists the promises that the database does not keep.
func (p promises) lost(w *world) (lost []string) {
	for _, what := range slices.Sorted(maps.Keys(p)) {
		var writer, number int
		if n, _ := fmt.Sscanf(what, "step of %d", &writer); n == 1 {
			_, err := fmt.Sscan(p[what], &number)
			require.NoError(w.t, err)
			if there := w.steps(writer); there < number {
				lost = append(lost, fmt.Sprintf("writer %d: %d of %d steps", writer, there, number))
			}
		}
	}
	return lost
}

// die lets the helpers of tests run in a process of its own.
type die struct{ testing.TB }

func (die) Helper()                  {}
func (die) Context() context.Context { return context.Background() }
func (die) FailNow()                 { os.Exit(3) }
func (die) Errorf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format, args...)
	os.Exit(3)
}
