package query

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

func TestEveryTypeOfEventHasAPermissionToSeeIt(t *testing.T) {
	for _, of := range event.Types() {
		require.NotEmpty(t, permissionOfEvent(of), of)
	}
	require.Empty(t, permissionOfEvent("unknown.type"))
}

// Who may only read the org learns from its events nothing of whom it has, has invited, or lets in.
func TestEventsOfPeopleAndCredentialsNeedMoreThanToReadTheOrg(t *testing.T) {
	org, role := db.NewID(), db.NewID()
	r := &EventReader{}
	r.Replace(iam.Principal{
		Type: principal.User, ID: db.NewID(), OrgID: org,
		Bindings: []iam.Binding{{Role: iam.Role(role), Permissions: []iam.Permission{iam.OrgRead}}},
	})
	for _, of := range event.Types() {
		want := strings.HasPrefix(of, "iam.org.")
		if strings.HasPrefix(of, "iam.") || strings.HasPrefix(of, "security.") || strings.HasPrefix(of, "billing.credit") {
			require.Equal(t, want, r.MaySee(&event.Event{Type: of, OrgID: org}), of)
		}
	}
}

// Law 10: a user of no org is the platform's own, and not one of every org.
func TestLaw10EventsOfUsersOfNoOrgAreForPlatformAdminsAlone(t *testing.T) {
	admin := iam.Principal{
		Type: principal.User, ID: db.NewID(), OrgID: db.NewID(), Bindings: []iam.Binding{{Role: iam.OrgAdmin}},
	}
	require.NoError(t, iam.Authorize(admin, iam.UserRead, "", ""), "what belongs to the platform is in every org")
	platform := iam.Principal{Type: principal.User, ID: db.NewID(), PlatformAdmin: true}
	r := &EventReader{}
	for _, of := range event.Types() {
		if !strings.HasPrefix(of, "iam.") {
			continue
		}
		r.Replace(admin)
		require.False(t, r.MaySee(&event.Event{Type: of}), of)
		r.Replace(platform)
		require.True(t, r.MaySee(&event.Event{Type: of}), of)
	}
}

// Law 10: a draft of an app of the platform is listed for platform admins alone, and its event tells no tenant of it.
func TestLaw10EventsOfDraftsOfThePlatformAreForPlatformAdminsAlone(t *testing.T) {
	admin := iam.Principal{
		Type: principal.User, ID: db.NewID(), OrgID: db.NewID(), Bindings: []iam.Binding{{Role: iam.OrgAdmin}},
	}
	r := &EventReader{}
	sees := func(p iam.Principal, of, orgID string) bool {
		r.Replace(p)
		return r.MaySee(&event.Event{Type: of, OrgID: orgID})
	}
	for _, of := range []string{
		"apps.version.registered", "apps.version.promoted", "apps.version.retired", "apps.slug.released",
		"apps.slug.transferred",
	} {
		require.Contains(t, event.Types(), of)
		require.False(t, sees(admin, of, ""), of)
		require.True(t, sees(iam.Principal{Type: principal.User, ID: db.NewID(), PlatformAdmin: true}, of, ""), of)
		require.True(t, sees(admin, of, admin.OrgID), "its own org's: %s", of)
	}
	require.True(t, sees(admin, "apps.version.published", ""), "what the platform offers")
}

// What belongs to no org is no org's: its webhooks leave it out, also those of an owner who may see it.
func TestAReaderOfAnOrgReadsItsEventsAlone(t *testing.T) {
	org := db.NewID()
	r := &EventReader{filter: EventFilter{OrgID: org}}
	for of, want := range map[string]bool{org: true, db.NewID(): false, "": false} {
		require.Equal(t, want, r.wants(&event.Event{Type: "fleet.node.online", OrgID: of}), of)
	}
}
