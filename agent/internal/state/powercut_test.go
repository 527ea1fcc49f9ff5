package state_test

import (
	"bufio"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/e2e/powerloss"
	"github.com/gpuaas/gpuaas/e2e/skip"
)

const diskMiB = 256

// TestLaw05NothingPromisedIsLostByAPowerCut: unlike a kill, a power cut takes what the kernel has not written yet, and
// what the disk has not flushed. The store is examined after each cut, and the next victim goes on with it.
func TestLaw05NothingPromisedIsLostByAPowerCut(t *testing.T) {
	skip.Root(t, "mounts and loop devices")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	m := victimMesh(t)
	disk, err := powerloss.New(filepath.Join(t.TempDir(), "disk"), filepath.Join(t.TempDir(), "point"), diskMiB)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, disk.Close()) })
	rounds := 12
	if testing.Short() {
		rounds = 4
	}
	for round := range rounds {
		if round > 0 {
			require.NoError(t, disk.PowerOn())
		}
		said := cutPower(t, disk, random)
		require.NoError(t, disk.Examine(func() {
			s := open(t, filepath.Join(disk.Point, "store"), m)
			checkPromised(t, s, said)
			checkChain(t, s, m)
			require.NoError(t, s.Close())
		}))
	}
}

// cutPower runs a victim on the disk until it has said a random number of lines, and cuts the power at a random moment
// after that. It returns all that the victim said.
func cutPower(t *testing.T, disk *powerloss.Disk, random *rand.Rand) string {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), victimEnv+"="+filepath.Join(disk.Point, "store"))
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	var said strings.Builder
	lines := bufio.NewScanner(stdout)
	for range random.IntN(100) + 1 {
		require.True(t, lines.Scan(), "the victim says more")
		said.WriteString(lines.Text() + "\n")
	}
	time.Sleep(time.Duration(random.IntN(10_000)) * time.Microsecond) // the moment within what the victim does next
	lost, err := disk.Cut(random, cmd.Process.Kill)
	require.NoError(t, err)
	for lines.Scan() {
		said.WriteString(lines.Text() + "\n")
	}
	require.Error(t, cmd.Wait(), "killed")
	t.Logf("%d pages lost, %d bytes said", lost, said.Len())
	return said.String()
}
