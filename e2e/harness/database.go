package harness

import (
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// Database opens the hub's private PostgreSQL.
func (w *Testbed) Database() *pgx.Conn {
	w.T.Helper()
	conn, err := pgx.Connect(w.Ctx, w.Hub.Config.DatabaseURL())
	require.NoError(w.T, err)
	w.T.Cleanup(func() { _ = conn.Close(w.Ctx) })
	return conn
}
