package command_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/protocol"
)

// The file of an earlier, wider delegation widens the one that replaced it no more, although it is valid still.
func TestAnOlderDelegationReplacesNoNewerOne(t *testing.T) {
	w := newWorld(t)
	s := w.Commands()
	s.Bundle = func() protocol.Bundle { return w.Bundle }
	public, _, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	register := func(key string, issued time.Time, prefix string) (catalog.Publisher, error) {
		env, err := protocol.SignMessage(protocol.PayloadDelegation, &protocol.Delegation{
			Publisher: &protocol.PublicKey{KeyId: protocol.KeyID(public), Ed25519: public}, OrgSlug: w.Project.OrgSlug,
			RepositoryPrefixes: []string{"org/" + w.Project.OrgSlug + "/" + prefix}, IssuedAt: timestamppb.New(issued),
			ExpiresAt: timestamppb.New(w.Now.Add(24 * time.Hour)),
		}, protocol.NewEd25519Signer(w.CatalogKey))
		require.NoError(t, err)
		return s.RegisterPublisher(t.Context(), w.Admin(key), env)
	}
	_, err = register("wide", w.Now.Add(-2*time.Hour), "")
	require.NoError(t, err)
	narrow, err := register("narrow", w.Now.Add(-time.Hour), "one/")
	require.NoError(t, err)
	before := w.Contents()
	_, err = register("wide again", w.Now.Add(-2*time.Hour), "")
	requireCode(t, catalog.CodePublisherOlder, err)
	require.Equal(t, before, w.Contents())
	same, err := register("narrow again", w.Now.Add(-time.Hour), "one/")
	require.NoError(t, err)
	require.Equal(t, narrow.RepositoryPrefixes, same.RepositoryPrefixes)
}
