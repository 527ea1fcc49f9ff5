package secret_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
)

func TestLaw10AProjectListsItsOwnCredentials(t *testing.T) {
	d, at := dbtest.New(t), time.Unix(1_800_000_000, 0).UTC()
	made := map[string]secret.Credential{}
	for _, name := range []string{"one", "two"} {
		c := secret.Credential{
			ID: db.NewID(), OrgID: db.NewID(), ProjectID: db.NewID(), Name: name, PublicKey: "k", Version: 1, Status: "active",
			ResourceVersion: 1, CreatedAt: at, UpdatedAt: at,
		}
		made[name] = c
		require.NoError(t, db.WriteTx(t.Context(), d, func(tx db.Tx) error {
			return secret.CreateCredential(t.Context(), tx, c)
		}))
	}
	for name, c := range made {
		list, err := db.ReadTx(t.Context(), d, func(tx db.Tx) ([]secret.Credential, error) {
			return secret.ListCredentials(t.Context(), tx, c.ProjectID, db.Page{Limit: 10})
		})
		require.NoError(t, err)
		require.Len(t, list, 1)
		require.Equal(t, name, list[0].Name)
	}
}
