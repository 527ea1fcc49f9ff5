package runtime

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// A named pipe at the place of /etc/passwd would block the start for ever. This one holds as much as is read of a file,
// so that a start that reads it ends, and finds the user.
func TestOnlyARegularFileOfAnImageNamesItsUsers(t *testing.T) {
	image := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(image, "etc"), 0o755))
	passwd := filepath.Join(image, "etc/passwd")
	line := []byte("app:x:7:8::/:/bin/sh\n")
	require.NoError(t, os.WriteFile(passwd, line, 0o644))
	found, err := execUser(image, "app")
	require.NoError(t, err)
	require.Equal(t, 7, found.Uid)

	require.NoError(t, os.Remove(passwd))
	require.NoError(t, unix.Mkfifo(passwd, 0o644))
	pipe, err := os.OpenFile(passwd, os.O_RDWR, 0)
	require.NoError(t, err)
	defer func() { _ = pipe.Close() }()
	_, err = unix.FcntlInt(pipe.Fd(), unix.F_SETPIPE_SZ, maxUserFileBytes)
	require.NoError(t, err)
	_, err = pipe.Write(append(line, bytes.Repeat([]byte("\n"), maxUserFileBytes-len(line))...))
	require.NoError(t, err)
	_, err = execUser(image, "app")
	require.ErrorContains(t, err, "The image's /etc/passwd cannot be read.")

	require.NoError(t, os.Remove(passwd))
	require.NoError(t, os.Symlink("other", passwd))
	require.NoError(t, os.WriteFile(filepath.Join(image, "etc/other"), line, 0o644))
	found, err = execUser(image, "app")
	require.NoError(t, err)
	require.Equal(t, 7, found.Uid, "a link within the image")
}

// What has no id in the containers' range would have that number on the host: in a copy, and in the container's spec.
func TestNoIDOfAUserLiesBeyondThoseOfContainers(t *testing.T) {
	r := &Runtime{cfg: Config{UIDMapSize: 1000}, host: hostSupport{userNamespaces: true}}
	require.NoError(t, r.checkUser(user{uid: 999, gid: 999, groups: []uint32{0, 999}}))
	for what, u := range map[string]user{
		"user":        {uid: 1000},
		"group":       {gid: 1000},
		"other group": {groups: []uint32{0, 1000}},
	} {
		require.ErrorContains(t, r.checkUser(u), "must be below 1000", what)
	}
}
