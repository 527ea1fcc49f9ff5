package secret_test

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/internal/secret"
)

func newKEK(t *testing.T, b byte) secret.KEK {
	t.Helper()
	k, err := secret.NewKEK(bytes.Repeat([]byte{b}, 32))
	require.NoError(t, err)
	return k
}

func TestSealedValueOpensOnlyInItsPlaceAndUnchanged(t *testing.T) {
	s := secret.NewSealer(newKEK(t, 1))
	rapid.Check(t, func(rt *rapid.T) {
		plain := rapid.SliceOfN(rapid.Byte(), 0, 200).Draw(rt, "plain")
		sealed, err := s.Seal(plain, []byte("row-1"))
		require.NoError(rt, err)
		if len(plain) > 8 {
			require.NotContains(rt, string(sealed), string(plain))
		}
		got, err := s.Open(sealed, []byte("row-1"))
		require.NoError(rt, err)
		require.True(rt, bytes.Equal(plain, got))

		_, err = s.Open(sealed, []byte("row-2"))
		require.Error(rt, err, "copied to another row")
		i := rapid.IntRange(0, len(sealed)-1).Draw(rt, "flipped")
		sealed[i] ^= 1
		_, err = s.Open(sealed, []byte("row-1"))
		require.Error(rt, err, "byte %d flipped", i)
	})
}

func TestOldKeyOpensAfterRotation(t *testing.T) {
	older, newer := newKEK(t, 1), newKEK(t, 2)
	sealed, err := secret.NewSealer(older).Seal([]byte("x"), nil)
	require.NoError(t, err)
	got, err := secret.NewSealer(newer, older).Open(sealed, nil)
	require.NoError(t, err)
	require.Equal(t, "x", string(got))
	_, err = secret.NewSealer(newer).Open(sealed, nil)
	require.ErrorContains(t, err, "unknown key")
}

func TestCutShortIsRefused(t *testing.T) {
	s := secret.NewSealer(newKEK(t, 1))
	sealed, err := s.Seal([]byte("x"), nil)
	require.NoError(t, err)
	for n := range sealed {
		_, err := s.Open(sealed[:n], nil)
		require.Error(t, err)
	}
	_, err = s.Seal(make([]byte, secret.MaxPlaintext+1), nil)
	require.Error(t, err)
}

func TestKeyFileIsMadeOnceAndPrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kek")
	var wg sync.WaitGroup
	ids := make([][8]byte, 8)
	for i := range ids {
		wg.Go(func() {
			k, err := secret.LoadKEK(path)
			if err != nil {
				t.Error(err)
				return
			}
			ids[i] = k.ID()
		})
	}
	wg.Wait()
	for _, id := range ids {
		require.Equal(t, ids[0], id, "all that start at once have one key")
	}
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	left, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, left, 1)

	require.NoError(t, os.Chmod(path, 0o640))
	_, err = secret.LoadKEK(path)
	require.ErrorContains(t, err, "chmod 600")

	require.NoError(t, os.Chmod(path, 0o600))
	require.NoError(t, os.WriteFile(path, []byte("short\n"), 0o600))
	_, err = secret.LoadKEK(path)
	require.ErrorContains(t, err, "backup")
}
