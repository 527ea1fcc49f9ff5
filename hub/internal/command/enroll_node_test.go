package command_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
)

// A node may ask again for an answer that was lost. Its join token counts for days, though, and who has it writes no
// more events and audit rows with it than by renewals.
func TestAJoinTokenThatIsUsedAgainAndAgainLeavesOneEventAMinute(t *testing.T) {
	w := newWorld(t)
	w.Tx(func(ctx context.Context, tx db.Tx) error {
		_, err := fleet.CreateToken(ctx, tx, fleet.NewToken{ID: db.NewID(), Secret: "secret", CreatedBy: "admin"}, w.Now)
		return err
	})
	s := &command.Service{DB: w.DB, Keys: w.keys(), CertificateTTL: time.Hour}
	in := command.EnrollNodeInput{JoinToken: "secret", Hostname: "n2", CSRPEM: hubtest.CSR(t, w.key())}
	enroll := func() command.NodeCredentials {
		t.Helper()
		c, err := s.EnrollNode(t.Context(), command.Meta{CorrelationID: "c", Now: w.Now}, in)
		require.NoError(t, err)
		require.NotEmpty(t, c.Certificate.CertificatePEM)
		return c
	}
	first := enroll()
	for range 10 {
		w.Now = w.Now.Add(time.Second)
		require.Equal(t, first.NodeID, enroll().NodeID)
	}
	rows := func() (events, audit int) {
		return w.Count(`SELECT count(*) FROM events WHERE subject = $1`, first.NodeID),
			w.Count(`SELECT count(*) FROM audit_rows WHERE resource_id = $1`, first.NodeID)
	}
	events, audit := rows()
	require.Equal(t, 1, events)
	require.Equal(t, 1, audit)
	w.Now = w.Now.Add(time.Minute)
	enroll()
	events, audit = rows()
	require.Equal(t, 2, events, "a certificate that ends later is the node's newest")
	require.Equal(t, 2, audit)
}
