package iam_test

import (
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// cached authenticates by a cache, as the API does.
func (w world) cached(t *testing.T, c *iam.PrincipalCache, token string, now time.Time) (iam.Principal, error) {
	t.Helper()
	return db.Query(t.Context(), w.d, func(tx db.Tx) (iam.Principal, error) {
		return iam.Authenticate(t.Context(), tx, w.proofs, c, token, now)
	})
}

func TestARememberedPrincipalIsTheOneThatIsRead(t *testing.T) {
	w := newWorld(t)
	c := iam.NewPrincipalCache(w.d)
	tok, err := w.mint(t, w.byKey(), start())
	require.NoError(t, err)
	plain, err := w.authenticate(t, tok.Text, start())
	require.NoError(t, err)
	for range 2 {
		p, err := w.cached(t, c, tok.Text, start())
		require.NoError(t, err)
		require.Equal(t, plain, iam.WithoutMemo(p))
	}
	require.Equal(t, 1, c.Len())

	// It ends with the token, although it was read a moment before.
	last := tok.ExpiresAt.Add(-time.Millisecond)
	_, err = w.cached(t, c, tok.Text, last)
	require.NoError(t, err)
	_, err = w.cached(t, c, tok.Text, tok.ExpiresAt)
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)

	_, err = w.cached(t, c, "no token", start())
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
	require.Equal(t, 1, c.Len(), "a refusal is not remembered")
}

// What another process changes is noticed late, and no later than that.
func TestARememberedPrincipalIsReadAgainAfterAMoment(t *testing.T) {
	url := dbtest.URL(t)
	own, err := db.Open(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(own.Close)
	other, err := db.Open(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(other.Close)
	w := newWorldOn(t, own)
	c := iam.NewPrincipalCache(w.d)
	tok, err := w.mint(t, w.byKey(), start())
	require.NoError(t, err)
	_, err = w.cached(t, c, tok.Text, start())
	require.NoError(t, err)
	must(t, other, func(tx db.Tx) (int, error) {
		_, err := tx.Exec(t.Context(), `UPDATE service_accounts SET status = 'disabled' WHERE id = $1`, w.sa.ID)
		return 0, err
	})
	_, err = w.cached(t, c, tok.Text, start().Add(time.Second-time.Millisecond))
	require.NoError(t, err)
	_, err = w.cached(t, c, tok.Text, start().Add(time.Second))
	require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
}

// Readers fill the cache again and again while accounts are disabled: none counts once the change has been answered.
func TestLaw10NoRevokedTokenCountsOnceItsRevocationIsAnswered(t *testing.T) {
	w := newWorld(t)
	c := iam.NewPrincipalCache(w.d)
	tok, err := w.mint(t, w.byKey(), start())
	require.NoError(t, err)
	set := func(status string) {
		must(t, w.d, func(tx db.Tx) (int, error) {
			_, err := tx.Exec(t.Context(), `UPDATE service_accounts SET status = $2 WHERE id = $1`, w.sa.ID, status)
			return 0, err
		})
	}
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = w.cached(t, c, tok.Text, start())
				}
			}
		})
	}
	for range 100 {
		set(iam.StatusDisabled)
		_, err := w.cached(t, c, tok.Text, start())
		require.True(t, fault.Is(err, fault.Unauthenticated), "%v", err)
		set("active")
		_, err = w.cached(t, c, tok.Text, start())
		require.NoError(t, err)
	}
	close(stop)
	readers.Wait()
}

func TestTheCacheWatchesEachTableThatDecidesWhoCalls(t *testing.T) {
	tables := map[string]bool{}
	for _, statement := range iam.StatementsOfAuthenticate() {
		for _, m := range regexp.MustCompile(`(?:FROM|JOIN)\s+([a-z_]+)`).FindAllStringSubmatch(statement, -1) {
			tables[m[1]] = true
		}
	}
	require.Len(t, tables, len(iam.PrincipalTables()))
	for _, table := range iam.PrincipalTables() {
		require.True(t, tables[table], table)
	}
}
