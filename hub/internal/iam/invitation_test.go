package iam_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// invite makes an invitation by an admin of the org, who is made, too.
func (w world) invite(t *testing.T, orgID, email string, roles ...iam.Role) (iam.Invitation, iam.User, string) {
	t.Helper()
	token := "token-" + email
	var admin iam.User
	made := must(t, w.d, func(tx db.Tx) (i iam.Invitation, err error) {
		admin, err = iam.CreateUser(t.Context(), tx, iam.User{
			ID: db.NewID(), OrgID: orgID, Email: "by-" + email, DisplayName: "Ada", Roles: []iam.Role{iam.OrgAdmin},
			CreatedAt: start(),
		})
		if err != nil {
			return i, err
		}
		by, err := iam.CurrentPrincipal(t.Context(), tx, iam.Principal{Type: "user", ID: admin.ID}.Actor())
		if err != nil {
			return i, err
		}
		made, _, err := iam.CreateInvitation(t.Context(), tx, by, iam.Invitation{
			ID: db.NewID(), OrgID: orgID, Email: email, Roles: roles, InvitedBy: admin.ID, CreatedAt: start(),
			ExpiresAt: start().Add(time.Hour),
		}, token)
		return made, err
	})
	return made, admin, token
}

func TestAnInvitationCountsUntilItsTimeIsOver(t *testing.T) {
	w := newWorld(t)
	_, admin, token := w.invite(t, w.org.ID, "bob@acme.example")
	w.invite(t, w.other.ID, "eve@other.example")
	end := start().Add(time.Hour)
	for now, open := range map[time.Time]bool{end.Add(-time.Second): true, end: false} {
		list := must(t, w.d, func(tx db.Tx) ([]iam.Invitation, error) {
			return iam.ListInvitations(t.Context(), tx, w.org.ID, now, db.Page{Limit: 10})
		})
		require.Equal(t, open, len(list) == 1)
		_, err := run(t, w.d, func(tx db.Tx) (iam.Invitation, error) {
			return iam.OpenInvitation(t.Context(), tx, token, now)
		})
		require.Equal(t, open, err == nil)
	}
	_, err := run(t, w.d, func(tx db.Tx) (iam.Invitation, error) {
		_, err := tx.Exec(t.Context(), `UPDATE users SET disabled_at = $2 WHERE id = $1`, admin.ID, start())
		require.NoError(t, err)
		return iam.OpenInvitation(t.Context(), tx, token, start())
	})
	require.True(t, fault.Is(err, fault.Unauthenticated), "who invited is no active user any more")
}

func TestAddressesDifferInAllButTheCaseOfASCII(t *testing.T) {
	w := newWorld(t)
	made, _, _ := w.invite(t, w.org.ID, "Ma\u212a@Acme.Example")
	require.Equal(t, "ma\u212a@acme.example", made.Email, "U+212A is not a k")
}

// An admin who is one no longer does not come back by an invitation of before.
func TestAnInvitationCountsWhileItsMakerMayMakeIt(t *testing.T) {
	w := newWorld(t)
	_, admin, token := w.invite(t, w.org.ID, "bob@acme.example", iam.OrgAdmin)
	open := func(as iam.Role) error {
		_, err := run(t, w.d, func(tx db.Tx) (iam.Invitation, error) {
			_, err := tx.Exec(t.Context(), `UPDATE role_bindings SET role = $2 WHERE user_id = $1`, admin.ID, as)
			require.NoError(t, err)
			return iam.OpenInvitation(t.Context(), tx, token, start())
		})
		return err
	}
	require.NoError(t, open(iam.OrgAdmin))
	require.True(t, fault.Is(open(iam.OrgMember), fault.Unauthenticated))
	require.NoError(t, open(iam.OrgAdmin))
}

func TestARoleThatIsDeletedTakesItsOwnInvitationsAlong(t *testing.T) {
	w := newWorld(t)
	role := must(t, w.d, func(tx db.Tx) (iam.CustomRole, error) {
		by := iam.Principal{Type: "user", ID: db.NewID(), OrgID: w.org.ID, Bindings: []iam.Binding{{Role: iam.OrgAdmin}}}
		return iam.CreateCustomRole(t.Context(), tx, by, iam.CustomRole{
			ID: db.NewID(), OrgID: w.org.ID, Slug: "reader", DisplayName: "Reader",
			Permissions: []iam.Permission{iam.InstanceRead}, CreatedAt: start(),
		})
	})
	w.invite(t, w.org.ID, "one@acme.example", iam.Role(role.ID))
	w.invite(t, w.org.ID, "two@acme.example")
	left := must(t, w.d, func(tx db.Tx) ([]iam.Invitation, error) {
		require.NoError(t, iam.DeleteCustomRole(t.Context(), tx, role))
		return iam.ListInvitations(t.Context(), tx, w.org.ID, start(), db.Page{Limit: 10})
	})
	require.Len(t, left, 1)
	require.Equal(t, "two@acme.example", left[0].Email)
}
