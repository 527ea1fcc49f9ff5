package filecopy

import (
	"archive/tar"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A pipe that nobody writes to would hold the copy, and its place among the copies of the node, for ever.
func TestAFileThatHasBecomeAPipeHoldsNoCopy(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "data")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	root, err := os.OpenRoot(dir)
	require.NoError(t, err)
	defer func() { _ = root.Close() }()
	p := packer{root: root, tar: tar.NewWriter(io.Discard)}
	ended := make(chan error, 1)
	go func() { ended <- p.packFile("data") }()
	select {
	case err := <-ended:
		require.ErrorIs(t, err, errChanged)
	case <-time.After(30 * time.Second):
		writer, err := os.OpenFile(pipe, os.O_RDWR, 0) // lets it end
		require.NoError(t, err)
		require.Error(t, <-ended)
		require.NoError(t, writer.Close())
		t.Fatal("the copy waits for a writer")
	}
}
