package command_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/hubtest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestOnlyAPlatformAdminMakesAndChangesPlatformAdmins(t *testing.T) {
	p := newPerson(newWorld(t))
	s, yes, no := p.Commands(), true, false
	put := func(platformAdmin *bool, role iam.Role, byAdmin bool) (iam.User, error) {
		m := p.Meta("")
		if byAdmin {
			m = p.Admin("")
		}
		return s.PutUserRoles(t.Context(), m, p.user.ID, iam.Roles{Named: []iam.Role{role}}, platformAdmin)
	}
	_, err := put(&yes, iam.OrgBilling, false)
	require.True(t, fault.Is(err, fault.Forbidden), "%v", err)
	user, err := put(&no, iam.OrgBilling, false)
	require.NoError(t, err, "it is none")
	require.False(t, user.PlatformAdmin)
	user, err = put(&yes, iam.OrgBilling, true)
	require.NoError(t, err)
	require.True(t, user.PlatformAdmin)
	user, err = put(nil, iam.OrgMember, true)
	require.NoError(t, err)
	require.True(t, user.PlatformAdmin, "it was not asked for")
	for _, admin := range []*bool{&no, nil} {
		_, err = put(admin, iam.OrgMember, false)
		require.True(t, fault.Is(err, fault.Forbidden), "%v", err)
	}
	_, err = s.DisableUser(t.Context(), p.Meta("disable"), p.user.ID)
	require.True(t, fault.Is(err, fault.Forbidden), "%v", err)
}

func TestAUserIsRemovedFromTheOwnOrgAlone(t *testing.T) {
	p := newPerson(newWorld(t))
	other, _ := p.NewTenant("other")
	before := p.Contents()
	err := p.Commands().RemoveOrgUser(t.Context(), p.Admin(""), other.OrgID, p.user.ID)
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	require.Equal(t, before, p.Contents())
	require.NoError(t, p.Commands().RemoveOrgUser(t.Context(), p.Admin(""), p.Project.OrgID, p.user.ID))
}

func TestAProjectOfNoNamedOrgBelongsToTheCallers(t *testing.T) {
	w := newWorld(t)
	made, err := w.Commands().CreateProject(t.Context(), w.Meta("own"), iam.Project{Slug: "fresh", DisplayName: "F"})
	require.NoError(t, err)
	require.Equal(t, w.Project.OrgID, made.OrgID)
	_, err = w.Commands().CreateProject(t.Context(), w.Admin("none"), iam.Project{Slug: "fresher", DisplayName: "F"})
	w.requireRefused(err, fault.CodeInvalid, "/org_id")
	other, _ := w.NewTenant("other")
	_, err = w.Commands().CreateProject(t.Context(), w.Meta("foreign"), iam.Project{
		OrgID: other.OrgID, Slug: "fresh", DisplayName: "F",
	})
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
}

// Who follows events would else take the invitation of before for one that still counts.
func TestAnInvitationThatANewOneEndsIsAnEvent(t *testing.T) {
	p := newPerson(newWorld(t))
	p.User.ID = p.user.ID
	s := p.Commands()
	s.Sealer = hubtest.PlainSealer{}
	invite := func(key string) string {
		made, err := s.CreateInvitation(t.Context(), p.Meta(key), command.CreateInvitationInput{
			OrgID: p.Project.OrgID, Email: "bob@acme.example", Lifetime: time.Hour,
		})
		require.NoError(t, err)
		return made.Invitation.ID
	}
	revoked := func(id string) int {
		return p.Count(`SELECT count(*) FROM events WHERE type = 'iam.invitation.revoked' AND subject = $1
			AND resource_version = 2`, id)
	}
	first := invite("first")
	second := invite("second")
	require.Equal(t, 1, revoked(first))
	require.Zero(t, revoked(second))
	p.Now = p.Now.Add(2 * time.Hour)
	invite("third")
	require.Zero(t, revoked(second), "its time was over")
}
