package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestTheMachineIsBusyWithAllButIdleAndDisk(t *testing.T) {
	file := filepath.Join(t.TempDir(), "stat")
	require.NoError(t, os.WriteFile(file, []byte("cpu  100 20 30 1000 50 1 2 7 0 0\ncpu0 1 1 1 1\n"), 0o600))
	busy, disk, err := machineTime(file)
	require.NoError(t, err)
	require.Equal(t, 1600*time.Millisecond, busy)
	require.Equal(t, 500*time.Millisecond, disk)
}

func TestUseIsTheDifferenceOfTwoReadingsASecond(t *testing.T) {
	begin := time.Now()
	before := counters{at: begin, hub: time.Second, busy: 2 * time.Second, commits: 100, wal: 1000}
	after := counters{
		at: begin.Add(10 * time.Second), hub: 6 * time.Second, busy: 12 * time.Second, commits: 600, wal: 21_000,
		database: time.Second,
	}
	u := between(before, after)
	require.InDelta(t, 0.5, u.Hub, 1e-9)
	require.InDelta(t, 0.1, u.Database, 1e-9)
	require.InDelta(t, 1, u.Busy, 1e-9)
	require.InDelta(t, 50, u.Commits, 1e-9)
	require.InDelta(t, 2000, u.WALBytes, 1e-9)
}

func TestAProfileNamesTheFunctionsWithTheLargestShares(t *testing.T) {
	report := "# Overhead  Symbol\n# ........  ......\n#\n" +
		"    21.50%  [.] runtime.mallocgc    -      -            \n" +
		"     4.65%  [k] nf_ct_iterate_cleanup                      -      -            \n" +
		"     1.00%  [.] crypto/ed25519.Verify -  -\n"
	require.Equal(t, "runtime.mallocgc 21.50%, nf_ct_iterate_cleanup (kernel) 4.65%", topFunctions(report, 2))
}
