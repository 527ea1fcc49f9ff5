package main

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAppShowsTheDigestsOfTheSecretsThatItHasLoadedAndOfTheFiles(t *testing.T) {
	none, err := newApp(env(nil), time.Now())
	require.NoError(t, err)
	_, body := ask(t, none, "GET", "/secrets")
	require.JSONEq(t, `{"loaded": {}, "files": {}}`, body)

	const first = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
	const second = "cb8379ac2098aa165029e3938a51da0bcecfc008fd6795f401178647f96c5b34"
	dir := t.TempDir()
	path := filepath.Join(dir, "token")
	require.NoError(t, os.WriteFile(path, []byte("abc"), 0o600))
	a, err := newApp(env(map[string]string{"GPUAAS_PARAMETERS_DIR": dir}), time.Now())
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, []byte("def"), 0o600))
	_, body = ask(t, a, "GET", "/secrets")
	require.JSONEq(t, `{"loaded": {"token": "`+first+`"}, "files": {"token": "`+second+`"}}`, body)
	require.NoError(t, a.load())
	_, body = ask(t, a, "GET", "/secrets")
	require.JSONEq(t, `{"loaded": {"token": "`+second+`"}, "files": {"token": "`+second+`"}}`, body)

	require.NoError(t, os.RemoveAll(dir))
	require.Error(t, a.load())
	code, _ := ask(t, a, "GET", "/secrets")
	require.Equal(t, http.StatusInternalServerError, code)
}
