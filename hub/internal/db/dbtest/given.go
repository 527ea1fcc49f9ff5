package dbtest

import (
	"context"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// Given is the variable that names a PostgreSQL by its URL, of another version or run elsewhere: the tests make their
// databases there. Its role may create databases and end sessions.
const Given = "GPUAAS_TEST_POSTGRES"

// emptyOn is a database of this test's own on a given server.
func emptyOn(t testing.TB, server string) string {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatalf("%s: %v", Given, err)
	}
	name := "gpuaas_test_" + strings.ReplaceAll(db.NewID(), "-", "")
	if err := on(t.Context(), server, "CREATE DATABASE "+name+" TEMPLATE template0"); err != nil {
		t.Fatalf("make test database: %v", err)
	}
	t.Cleanup(func() {
		if err := on(context.WithoutCancel(t.Context()), server, "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Errorf("drop test database: %v", err)
		}
	})
	u.Path = "/" + name
	return u.String()
}

// migratedOn is emptyOn with every migration.
func migratedOn(t testing.TB, server string) string {
	t.Helper()
	at := emptyOn(t, server)
	d, err := db.Open(t.Context(), at)
	if err != nil {
		t.Fatalf("open test database: %v", err)
	}
	defer d.Close()
	if err := db.Migrate(t.Context(), d); err != nil {
		t.Fatalf("migrate test database: %v", err)
	}
	return at
}

// on runs a statement outside a transaction.
func on(ctx context.Context, server, statement string) error {
	conn, err := pgx.Connect(ctx, server)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	_, err = conn.Exec(ctx, statement)
	return err
}
