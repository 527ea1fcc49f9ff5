package local_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/local"
	"github.com/gpuaas/gpuaas/e2e/skip"
	"github.com/gpuaas/gpuaas/pkg/durable/durabletest"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestLaw15TheOwnersPolicyCountsUntilAnotherCanBeRead(t *testing.T) {
	dir := t.TempDir()
	path, kept := filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "kept")
	age := time.Unix(1_800_000_000, 0)
	write := func(doc string) {
		require.NoError(t, os.WriteFile(path, []byte(doc), 0o600))
		age = age.Add(time.Second)
		require.NoError(t, os.Chtimes(path, age, age))
	}
	closed := func(p *local.PolicyFile) bool {
		rules, err := p.Read()
		require.NoError(t, err)
		return rules.Closed
	}
	_, err := local.OpenPolicy(path, kept, []byte("key"))
	require.EqualValues(t, "policy_missing", fault.As(err).Code)
	write("closed: maybe")
	_, err = local.OpenPolicy(path, kept, []byte("key"))
	require.EqualValues(t, "policy_invalid", fault.As(err).Code)

	write("closed: true")
	p, err := local.OpenPolicy(path, kept, []byte("key"))
	require.NoError(t, err)
	require.True(t, closed(p))
	write("closed: false")
	require.False(t, closed(p))
	write("closed: true ")
	require.True(t, closed(p), "a file of the same size")

	write("closed: mabye")
	for range 2 {
		rules, err := p.Read()
		require.EqualValues(t, "policy_invalid", fault.As(err).Code)
		require.True(t, rules.Closed, "what counted before counts")
	}
	again, err := local.OpenPolicy(path, kept, []byte("key"))
	require.NoError(t, err, "a node comes back after a typing error")
	rules, err := again.Read()
	require.Error(t, err)
	require.True(t, rules.Closed)

	require.NoError(t, os.Remove(path))
	rules, err = again.Read()
	require.NoError(t, err, "nothing is wrong with a file that is away")
	require.True(t, rules.Closed, "one that is away for a moment opens nothing")
	write("")
	require.False(t, closed(again), "an empty one opens")
}

// An owner who deletes the default file allows everything. A policy of before must not count again once another file is
// there that cannot be read.
func TestThePolicyThatTheOwnerHasDeletedIsForgotten(t *testing.T) {
	if _, err := os.Stat(local.DefaultPolicyFile); err == nil {
		skip.Lacking(t, "this machine has an owner's policy in "+local.DefaultPolicyFile)
	}
	dir := t.TempDir()
	path, kept := filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "kept")
	require.NoError(t, os.WriteFile(path, []byte("closed: true"), 0o600))
	_, err := local.OpenPolicy(path, kept, []byte("key"))
	require.NoError(t, err)
	p, err := local.OpenPolicy(local.DefaultPolicyFile, kept, []byte("key"))
	require.NoError(t, err)
	rules, err := p.Read()
	require.NoError(t, err)
	require.False(t, rules.Closed)

	require.NoError(t, os.WriteFile(path, []byte("closed: maybe"), 0o600))
	_, err = local.OpenPolicy(path, kept, []byte("key"))
	require.EqualValues(t, "policy_invalid", fault.As(err).Code)
}

// The copy counts where the owner's file cannot be read. A byte of it that was altered must not admit more.
func TestLaw15AnAlteredCopyOfTheOwnersPolicyDoesNotCount(t *testing.T) {
	dir := t.TempDir()
	path, kept := filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "kept")
	require.NoError(t, os.WriteFile(path, []byte("orgs: {never: [acme]}"), 0o600))
	_, err := local.OpenPolicy(path, kept, []byte("key"))
	require.NoError(t, err)
	whole, err := os.ReadFile(kept)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, []byte("orgs: ["), 0o600))
	p, err := local.OpenPolicy(path, kept, []byte("key"))
	require.NoError(t, err)
	rules, err := p.Read()
	require.Error(t, err)
	require.Equal(t, []string{"acme"}, rules.Orgs.Never)
	for at := range whole {
		altered := bytes.Clone(whole)
		altered[at] ^= 0x01
		require.NoError(t, os.WriteFile(kept, altered, 0o600))
		_, err := local.OpenPolicy(path, kept, []byte("key"))
		require.EqualValues(t, "policy_invalid", fault.As(err).Code, "byte %d", at)
	}
	require.NoError(t, os.WriteFile(kept, []byte("closed: false\n"), 0o600))
	_, err = local.OpenPolicy(path, kept, []byte("key"))
	require.EqualValues(t, "policy_invalid", fault.As(err).Code, "without a code")
}

// A node starts on a full disk, by the owner's file alone: the agent's copy of it may not be there yet.
func TestLaw15TheOwnersPolicyCountsWhereItCannotBeCopied(t *testing.T) {
	full := t.TempDir()
	path, kept := filepath.Join(t.TempDir(), "policy.yaml"), filepath.Join(full, "kept")
	require.NoError(t, os.WriteFile(path, []byte("closed: true"), 0o600))
	free := durabletest.FillDisk(t, full)
	p, err := local.OpenPolicy(path, kept, []byte("key"))
	free()
	require.NoError(t, err)
	require.NoFileExists(t, kept)
	rules, err := p.Read()
	require.NoError(t, err)
	require.True(t, rules.Closed)
	require.FileExists(t, kept, "it is copied once there is room")
}
