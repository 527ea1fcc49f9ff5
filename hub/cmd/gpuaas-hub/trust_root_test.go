package main

import (
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// shown is what `trust show -o json` says.
type shown struct {
	RootFingerprint string    `json:"root_fingerprint"`
	RootRoleDigest  string    `json:"root_role_digest"`
	RootThreshold   int       `json:"root_threshold"`
	Version         uint64    `json:"version"`
	ExpiresAt       time.Time `json:"expires_at"`
}

func (h home) show(t *testing.T) (s shown) {
	t.Helper()
	printed, err := cli(t, "trust", "show", "--data-dir", h.data, "-o", "json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal([]byte(printed), &s))
	return s
}

func TestTheRootIsRenewedRotatedAndSpreadFromTheCommandLine(t *testing.T) {
	h := newHome(t)
	trustCommand := func(verb string, args ...string) (string, error) {
		return cli(t, append([]string{
			"trust", verb, "--data-dir", h.data, "--key-dir", h.keys, "--passphrase-file",
			h.passphrase,
		}, args...)...)
	}
	first := h.show(t)
	require.Equal(t, h.fingerprint, first.RootFingerprint)
	require.WithinDuration(t, time.Now().Add(trust.DefaultBundleTTL), first.ExpiresAt, time.Hour)

	_, err := trustCommand("renew", "--bundle-lifetime", "48h")
	require.NoError(t, err)
	renewed := h.show(t)
	require.EqualValues(t, 2, renewed.Version)
	require.Equal(t, first.RootFingerprint, renewed.RootFingerprint)
	require.True(t, renewed.ExpiresAt.Before(first.ExpiresAt))
	text, err := cli(t, "trust", "show", "--data-dir", h.data)
	require.NoError(t, err)
	require.Contains(t, text, "trust renew", "an end that is near is said")

	printed, err := trustCommand("rotate-root", "--generate-passphrase")
	require.NoError(t, err)
	made := regexp.MustCompile(`shown this once: (\S+)`).FindStringSubmatch(printed)
	require.Len(t, made, 2)
	rotated := h.show(t)
	require.NotEqual(t, first.RootFingerprint, rotated.RootFingerprint)
	require.Contains(t, printed, rotated.RootFingerprint)
	_, err = trustCommand("renew")
	require.EqualValues(t, "passphrase_wrong", fault.As(err).Code, "the new key lies in the place of the old one")
	require.NoError(t, os.WriteFile(h.passphrase, []byte(made[1]), 0o600))

	printed, err = trustCommand("add-root")
	require.NoError(t, err)
	spread := h.show(t)
	require.Equal(t, 2, spread.RootThreshold)
	require.Equal(t, spread.RootRoleDigest, spread.RootFingerprint)
	require.True(t, strings.HasPrefix(spread.RootFingerprint, protocol.RootRolePrefix))
	require.Contains(t, printed, spread.RootFingerprint)
	_, err = trustCommand("renew")
	require.EqualValues(t, "root_key_wrong", fault.As(err).Code)
	_, err = trustCommand("renew", "--root-key-file", filepath.Join(h.keys, "root-2.age"), "--root-key-file",
		filepath.Join(h.keys, "root-3.age"))
	require.NoError(t, err)
	_, err = trustCommand("rotate-root", "--root-key-file", filepath.Join(h.keys, "root-2.age"), "--root-key-file",
		filepath.Join(h.keys, "root-3.age"))
	require.EqualValues(t, "flag_invalid", fault.As(err).Code, "which of three is not guessed")
}

// A root whose passphrase nobody has seen is lost.
func TestAPassphraseThatIsMadeIsShownBeforeItGuardsTheRoot(t *testing.T) {
	h := newHome(t)
	present, moved := filepath.Join(h.keys, trust.RootKeyFile), filepath.Join(h.keys, "moved.age")
	require.NoError(t, os.Rename(present, moved))
	require.NoError(t, os.Mkdir(present, 0o700))
	printed, err := cli(t, "trust", "rotate-root", "--data-dir", h.data, "--key-dir", h.keys, "--root-key-file", moved,
		"--passphrase-file", h.passphrase, "--generate-passphrase")
	require.EqualValues(t, "root_key_not_moved", fault.As(err).Code, "%v", err)
	made := regexp.MustCompile(`shown this once: (\S+)`).FindStringSubmatch(printed)
	require.Len(t, made, 2)
	require.NoError(t, trust.CheckRoot(trust.RootKey(present+".new", made[1])))
}

// Between its two effects, the bundle and the place of the key, the present root is in a file that seems left over.
func TestARotationThatWasCutOffIsFinished(t *testing.T) {
	h := newHome(t)
	present := filepath.Join(h.keys, trust.RootKeyFile)
	rotate := func(args ...string) (string, error) {
		return cli(t, append([]string{
			"trust", "rotate-root", "--data-dir", h.data, "--key-dir", h.keys, "--passphrase-file", h.passphrase,
		}, args...)...)
	}
	old, err := os.ReadFile(present)
	require.NoError(t, err)
	_, err = rotate()
	require.NoError(t, err)
	rotated := h.show(t)
	require.NoError(t, os.Rename(present, present+".new"))
	require.NoError(t, os.WriteFile(present, old, 0o600))

	printed, err := rotate()
	require.NoError(t, err)
	require.Contains(t, printed, rotated.RootFingerprint)
	require.Equal(t, rotated, h.show(t), "it is not rotated twice")
	require.NoFileExists(t, present+".new")
	_, err = cli(t, "trust", "renew", "--data-dir", h.data, "--key-dir", h.keys, "--passphrase-file", h.passphrase)
	require.NoError(t, err)

	// Before the bundle: the key that was made is nobody's root.
	require.NoError(t, os.WriteFile(present+".new", old, 0o600))
	_, err = rotate()
	require.ErrorContains(t, err, "remove the file")
	// Under another passphrase it may be the root.
	other := filepath.Join(h.dir, "other")
	require.NoError(t, os.WriteFile(other, []byte("another horse, another battery"), 0o600))
	require.NoError(t, os.Remove(present+".new"))
	_, err = rotate("--new-passphrase-file", other)
	require.NoError(t, err)
	require.NoError(t, os.Rename(present, present+".new"))
	require.NoError(t, os.WriteFile(present, old, 0o600))
	_, err = rotate()
	require.EqualValues(t, "key_file_exists", fault.As(err).Code)
	require.Contains(t, fault.As(err).Public, "Keep the file")
	_, err = rotate("--new-passphrase-file", other)
	require.NoError(t, err)
	require.NoFileExists(t, present+".new")
}

func TestTheLowestVersionOfAnAppIsSetAndLifted(t *testing.T) {
	h := newHome(t)
	set := func(args ...string) error {
		_, err := cli(t, append([]string{
			"trust", "min-version", "--data-dir", h.data, "--key-dir", h.keys,
			"--passphrase-file", h.passphrase, "--app", "jupyter",
		}, args...)...)
		return err
	}
	floor := func() string {
		keys, err := trust.Open(h.data)
		require.NoError(t, err)
		return keys.Bundle().MinVersion("jupyter")
	}
	require.EqualValues(t, "flag_invalid", fault.As(set()).Code)
	require.NoError(t, set("--version", "1.2.0"))
	require.Equal(t, "1.2.0", floor())
	require.NoError(t, set("--version", "1.3.0"))
	require.Equal(t, "1.3.0", floor())
	text, err := cli(t, "trust", "show", "--data-dir", h.data)
	require.NoError(t, err)
	require.Contains(t, text, "jupyter starts from version 1.3.0 on")
	require.NoError(t, set("--any"))
	require.Empty(t, floor())
}

// A revocation of the catalog key that was cut off leaves a new one that no bundle names.
func TestTheCatalogKeyIsReplacedOnlyWhereItWasRevoked(t *testing.T) {
	h := newHome(t)
	catalog := filepath.Join(h.keys, trust.CatalogKeyFile)
	kept := func() string {
		text, err := os.ReadFile(catalog)
		require.NoError(t, err)
		return string(text)
	}
	revoke := func(keyID string) {
		_, err := cli(t, "trust", "revoke", "--data-dir", h.data, "--key-dir", h.keys, "--passphrase-file", h.passphrase,
			"--key-id", keyID)
		require.NoError(t, err)
	}
	first := kept()
	keys, err := trust.Open(h.data)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(catalog+".new", []byte("cut off"), 0o600))
	revoke(keys.State().KeyID())
	require.Equal(t, first, kept())
	require.NoError(t, os.Remove(catalog+".new"))
	revoke(keys.Bundle().Keys(protocol.RoleCatalog)[0].GetKeyId())
	require.NotEqual(t, first, kept())
	require.NotEqual(t, "cut off", kept())
	require.NoFileExists(t, catalog+".new")
}

func TestARevocationOfTheCatalogKeyThatWasCutOffIsFinished(t *testing.T) {
	h := newHome(t)
	catalog := filepath.Join(h.keys, trust.CatalogKeyFile)
	keys, err := trust.Open(h.data)
	require.NoError(t, err)
	id := keys.Bundle().Keys(protocol.RoleCatalog)[0].GetKeyId()
	revoke := func() error {
		_, err := cli(t, "trust", "revoke", "--data-dir", h.data, "--key-dir", h.keys, "--passphrase-file", h.passphrase,
			"--key-id", id)
		return err
	}
	old, err := os.ReadFile(catalog)
	require.NoError(t, err)
	require.NoError(t, revoke())
	made, err := os.ReadFile(catalog)
	require.NoError(t, err)
	require.NoError(t, os.Rename(catalog, catalog+".new"))
	require.NoError(t, os.WriteFile(catalog, old, 0o600))

	require.NoError(t, revoke())
	now, err := os.ReadFile(catalog)
	require.NoError(t, err)
	require.Equal(t, string(made), string(now))
	require.NoFileExists(t, catalog+".new")
	require.EqualValues(t, "key_revoked_already", fault.As(revoke()).Code)
}

func TestInitPrintsAGeneratedPassphraseOnce(t *testing.T) {
	dir := t.TempDir()
	args := []string{
		"init", "--data-dir", filepath.Join(dir, "data"), "--key-dir", filepath.Join(dir, "keys"), "-o",
		"json",
	}
	short := filepath.Join(dir, "short")
	require.NoError(t, os.WriteFile(short, []byte("correct horse\n"), 0o600))
	_, err := cli(t, append(args, "--passphrase-file", short)...)
	require.EqualValues(t, "passphrase_short", fault.As(err).Code)
	_, err = cli(t, append(args, "--passphrase-file", short, "--generate-passphrase")...)
	require.EqualValues(t, "flag_invalid", fault.As(err).Code)

	printed, err := cli(t, append(args, "--generate-passphrase")...)
	require.NoError(t, err)
	var made map[string]string
	require.NoError(t, json.Unmarshal([]byte(printed), &made))
	require.GreaterOrEqual(t, len(made["passphrase"]), trust.MinPassphraseBytes)
	require.NoError(t, trust.CheckRoot(trust.RootKey(made["root_key_file"], made["passphrase"])))
}

func TestInitWithAnUnknownOutputMakesNoKey(t *testing.T) {
	dir := t.TempDir()
	_, err := cli(t, "init", "--data-dir", filepath.Join(dir, "hub"), "--generate-passphrase", "-o", "yaml")
	require.ErrorContains(t, err, "must be text or json")
	_, err = cli(t, "init", "--data-dir", filepath.Join(dir, "hub"), "--generate-passphrase", "--bundle-lifetime", "0")
	require.ErrorContains(t, err, "--bundle-lifetime")
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestTheOfflineKeysLieBesideTheDataDirectory(t *testing.T) {
	data := filepath.Join(t.TempDir(), "hub")
	printed, err := cli(t, "init", "--data-dir", data, "--generate-passphrase", "-o", "json")
	require.NoError(t, err)
	var made struct{ Passphrase string }
	require.NoError(t, json.Unmarshal([]byte(printed), &made))
	passphrase := filepath.Join(t.TempDir(), "passphrase")
	require.NoError(t, os.WriteFile(passphrase, []byte(made.Passphrase), 0o600))
	_, err = cli(t, "trust", "renew", "--data-dir", data, "--passphrase-file", passphrase)
	require.NoError(t, err)
}

// The line of age's header that names the recipient ends with log2 of the work for one guess.
func TestOnlyAPassphraseThatTheHubMadeIsNotStretched(t *testing.T) {
	h := newHome(t)
	own := filepath.Join(h.dir, "own")
	require.NoError(t, os.WriteFile(own, []byte("correct horse battery\n"), 0o600))
	work := func(file string) string {
		data, err := os.ReadFile(filepath.Join(h.keys, file))
		require.NoError(t, err)
		found := regexp.MustCompile(`\n-> scrypt \S+ (\d+)\n`).FindSubmatch(data)
		require.Len(t, found, 2)
		return string(found[1])
	}
	made := strconv.Itoa(trust.NewPassphraseWorkFactor)
	require.Equal(t, made, work("root.age"))
	require.Equal(t, made, work("catalog.age"))
	rotate := []string{
		"trust", "rotate-root", "--data-dir", h.data, "--key-dir", h.keys, "--passphrase-file", h.passphrase,
	}
	_, err := cli(t, append(rotate, "--new-passphrase-file", own)...)
	require.NoError(t, err)
	require.Equal(t, "18", work("root.age"))
	rotate[len(rotate)-1] = own
	_, err = cli(t, append(rotate, "--generate-passphrase")...)
	require.NoError(t, err)
	require.Equal(t, made, work("root.age"))
}

func TestANameThatTheAuthorityMayNotVouchForIsSaidAtTheStart(t *testing.T) {
	h := newHome(t)
	keys, err := trust.Open(h.data)
	require.NoError(t, err)
	for name, c := range map[string]config{
		"further name": {tlsNames: []string{"hub.example.com"}},
		"advertised":   {advertiseAPI: "203.0.113.7:8443"},
	} {
		err := checkNames(t.Context(), c, keys, "", slog.New(slog.DiscardHandler))
		require.EqualValues(t, "tls_name_not_permitted", fault.As(err).Code, name)
		require.Contains(t, fault.As(err).Public, "--tls-name", name)
	}
	permitted := config{advertiseAPI: "10.0.0.1:8443", tlsNames: []string{"hub.gpuaas.test"}}
	require.NoError(t, checkNames(t.Context(), permitted, keys, "", slog.New(slog.DiscardHandler)))
}
