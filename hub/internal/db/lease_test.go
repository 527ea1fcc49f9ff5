package db_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func process(owner string, pid int) db.Process {
	return db.Process{ID: db.NewID(), Owner: owner, Host: "host-" + owner, PID: pid}
}

func expireLease(t *testing.T, d *db.DB) {
	t.Helper()
	_, err := db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) {
		_, err := tx.Exec(t.Context(), `UPDATE hub_lease SET expires_at = now() - INTERVAL '1 second'`)
		return struct{}{}, err
	})
	require.NoError(t, err)
}

func TestSecondHubIsToldWhichOneWorksOnTheDatabase(t *testing.T) {
	d := dbtest.New(t)
	_, err := db.TakeLease(t.Context(), d, process("a", 4711))
	require.NoError(t, err)
	_, err = db.TakeLease(t.Context(), d, process("b", 4712))
	require.Equal(t, db.CodeLeaseHeld, fault.As(err).Code)
	require.ErrorContains(t, err, "process 4711 on host-a, since 20")
}

func TestSuccessorInTheSameDataDirectoryStartsAtOnce(t *testing.T) {
	d := dbtest.New(t)
	killed, err := db.TakeLease(t.Context(), d, process("a", 1))
	require.NoError(t, err)
	next, err := db.TakeLease(t.Context(), d, process("a", 2))
	require.NoError(t, err)
	kept, err := next.Renew(t.Context())
	require.NoError(t, err)
	require.True(t, kept)
	kept, err = killed.Renew(t.Context())
	require.NoError(t, err)
	require.False(t, kept)
	require.NoError(t, killed.End(t.Context()))
	_, err = db.TakeLease(t.Context(), d, process("b", 3))
	require.Equal(t, db.CodeLeaseHeld, fault.As(err).Code, "a process ends its own lease only")
}

func TestLeaseThatIsNotRenewedIsTakenOverAndItsHolderLearnsOfIt(t *testing.T) {
	d := dbtest.New(t)
	silent, err := db.TakeLease(t.Context(), d, process("a", 1))
	require.NoError(t, err)
	expireLease(t, d)
	kept, err := silent.Renew(t.Context())
	require.NoError(t, err)
	require.True(t, kept, "nobody has taken it")
	expireLease(t, d)
	_, err = db.TakeLease(t.Context(), d, process("b", 2))
	require.NoError(t, err)
	kept, err = silent.Renew(t.Context())
	require.NoError(t, err)
	require.False(t, kept)
	require.NoError(t, silent.End(t.Context()))
	_, err = db.TakeLease(t.Context(), d, process("c", 3))
	require.Equal(t, db.CodeLeaseHeld, fault.As(err).Code, "it ends its own only")
}

func TestHubThatStopsLetsAnotherStartAtOnce(t *testing.T) {
	d := dbtest.New(t)
	for i := range 3 {
		l, err := db.TakeLease(t.Context(), d, process(fmt.Sprint(i), i))
		require.NoError(t, err)
		require.NoError(t, l.End(t.Context()))
	}
}

// A backup holds the lease of the hub that it is of.
func TestRestoredHubNeedNotWaitForTheOneInItsBackup(t *testing.T) {
	d := dbtest.New(t)
	_, err := db.TakeLease(t.Context(), d, process("backed-up", 1))
	require.NoError(t, err)
	_, err = db.RunTx(t.Context(), d, func(tx db.Tx) (struct{}, error) {
		return struct{}{}, db.ForgetLease(t.Context(), tx)
	})
	require.NoError(t, err)
	_, err = db.TakeLease(t.Context(), d, process("restored", 2))
	require.NoError(t, err)
}
