package db

import (
	"fmt"
	"io"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

// pgx tells of a connection that the server closed between two statements in its own words.
func TestAClosedConnectionIsALostOne(t *testing.T) {
	require.True(t, isConnectionLoss(fmt.Errorf("failed to deallocate cached statement(s): %w", pgconn.ErrConnClosed)))
	require.True(t, isConnectionLoss(io.ErrUnexpectedEOF))
	require.True(t, isConnectionLoss(&pgconn.PgError{Code: "57P01"}))
	require.False(t, isConnectionLoss(&pgconn.PgError{Code: "23505"}))
	require.False(t, isConnectionLoss(fmt.Errorf("scan: %s", "unexpected type")))
}
