package harness

import (
	"net/url"
	"path/filepath"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// Database opens the hub's private PostgreSQL, which lets root in through its socket.
func (w *Testbed) Database() *pgx.Conn {
	w.T.Helper()
	socket := filepath.Join(w.Hub.Config.DataDir(), "postgres", "run")
	u := url.URL{
		Scheme: "postgres", User: url.User("gpuaas"), Path: "/gpuaas",
		RawQuery: url.Values{"host": {socket}}.Encode(),
	}
	conn, err := pgx.Connect(w.Ctx, u.String())
	require.NoError(w.T, err)
	w.T.Cleanup(func() { _ = conn.Close(w.Ctx) })
	return conn
}
