package secret_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/pkg/fault"
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

func TestTheNameOfAnActiveCredentialIsTaken(t *testing.T) {
	d := dbtest.New(t)
	c := secret.Credential{
		ID: db.NewID(), OrgID: db.NewID(), ProjectID: db.NewID(), Name: "one", PublicKey: "k", Version: 1,
		Status: secret.StatusActive, ResourceVersion: 1, CreatedAt: start(), UpdatedAt: start(),
	}
	create := func(c secret.Credential) error {
		c.ID = db.NewID()
		return write(t, d, func(tx db.Tx) error { return secret.CreateCredential(t.Context(), tx, c) })
	}
	require.NoError(t, create(c))
	require.True(t, fault.Is(create(c), fault.Conflict))
	c.ProjectID = db.NewID()
	require.NoError(t, create(c), "of another project")
}

func TestAProjectHasAThousandActiveCredentialsAtMost(t *testing.T) {
	d := dbtest.New(t)
	c := secret.Credential{
		ID: db.NewID(), OrgID: db.NewID(), ProjectID: db.NewID(), Name: "last", PublicKey: "k", Version: 1,
		Status: secret.StatusActive, ResourceVersion: 1, CreatedAt: start(), UpdatedAt: start(),
	}
	create := func(c secret.Credential) error {
		return write(t, d, func(tx db.Tx) error { return secret.CreateCredential(t.Context(), tx, c) })
	}
	require.NoError(t, write(t, d, func(tx db.Tx) error {
		_, err := tx.Exec(t.Context(), `INSERT INTO access_credentials (id, org_id, project_id, name, public_key, version,
			status, resource_version, created_at, updated_at)
			SELECT gen_random_uuid(), $1, $2, 'c' || n, 'k', 1, CASE n WHEN 1000 THEN 'revoked' ELSE 'active' END, 1, $3, $3
			FROM generate_series(1, 1000) n`, c.OrgID, c.ProjectID, start())
		return err
	}))
	require.NoError(t, create(c))
	c.ID, c.Name = db.NewID(), "more"
	require.True(t, fault.Is(create(c), fault.Conflict))
}
