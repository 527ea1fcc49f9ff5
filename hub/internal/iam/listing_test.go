package iam_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// TestListingsShowExactlyWhatThePoliciesAllow compares what SQL selects with the decision about each row.
func TestListingsShowExactlyWhatThePoliciesAllow(t *testing.T) {
	d := dbtest.New(t)
	ctx := t.Context()
	var orgs []iam.Org
	var projects []iam.Project
	must(t, d, func(tx db.Tx) (int, error) {
		orgs, projects = nil, nil
		for _, slug := range []string{"acme", "other"} {
			orgs = append(orgs, iam.Org{ID: db.NewID(), Slug: slug, DisplayName: slug, CreatedAt: start()})
			org := orgs[len(orgs)-1]
			require.NoError(t, iam.CreateOrg(ctx, tx, org))
			for i := range 3 {
				p, err := iam.CreateProject(ctx, tx, iam.Project{
					ID: db.NewID(), OrgID: org.ID, Slug: fmt.Sprint("p", i), DisplayName: "P", CreatedAt: start(),
				})
				require.NoError(t, err)
				projects = append(projects, p)
			}
		}
		return 0, nil
	})
	roles := rapid.SampledFrom([]iam.Role{
		"none", iam.OrgAdmin, iam.OrgMember, iam.OrgBilling, iam.AppPublisher, iam.ProjectAdmin, iam.AppOperator, iam.Viewer,
	})
	scopes := rapid.SampledFrom([]string{"", projects[0].ID, projects[1].ID, projects[2].ID})
	rapid.Check(t, func(t *rapid.T) {
		p := iam.Principal{
			Type: rapid.SampledFrom([]principal.Type{principal.User, principal.ServiceAccount}).Draw(t, "type"), ID: "any",
			OrgID:         rapid.SampledFrom([]string{orgs[0].ID, ""}).Draw(t, "org"),
			PlatformAdmin: rapid.SampledFrom([]bool{false, false, true}).Draw(t, "platform admin"),
		}
		if p.Type == principal.ServiceAccount {
			p.OrgID, p.ProjectID = orgs[0].ID, projects[0].ID
			p.Bindings = []iam.Binding{{Role: roles.Draw(t, "role"), ProjectID: p.ProjectID}}
		} else if p.OrgID != "" {
			for range rapid.IntRange(0, 4).Draw(t, "bindings") {
				p.Bindings = append(p.Bindings, iam.Binding{Role: roles.Draw(t, "role"), ProjectID: scopes.Draw(t, "scope")})
			}
			p.SortBindings()
		}
		orgID := rapid.SampledFrom([]string{"", orgs[0].ID, orgs[1].ID}).Draw(t, "named org")
		var allowed, listed []string
		for _, project := range projects {
			if (orgID == "" || orgID == project.OrgID) && iam.Authorize(p, iam.ProjectRead, project.OrgID, project.ID) == nil {
				allowed = append(allowed, project.ID)
			}
		}
		rows, err := db.ReadTx(ctx, d, func(tx db.Tx) ([]iam.Project, error) {
			return iam.ListProjects(ctx, tx, p, orgID, db.Page{})
		})
		require.NoError(t, err)
		for _, row := range rows {
			listed = append(listed, row.ID)
		}
		require.ElementsMatch(t, allowed, listed, "%+v", p)

		allowed, listed = nil, nil
		for _, org := range orgs {
			if known, err := iam.Decide(p, iam.Know, org.ID, ""); err == nil && known.Allowed {
				allowed = append(allowed, org.ID)
			}
		}
		found, err := db.ReadTx(ctx, d, func(tx db.Tx) ([]iam.Org, error) { return iam.ListOrgs(ctx, tx, p, db.Page{}) })
		require.NoError(t, err)
		for _, row := range found {
			listed = append(listed, row.ID)
		}
		require.ElementsMatch(t, allowed, listed, "%+v", p)
	})
}

// Law 16: an org that was made after the backup is taken over, also where another one has had its name since.
func TestLaw16AnOrgWhoseNameIsTakenIsAdoptedByAnother(t *testing.T) {
	w := newWorld(t)
	orgID, projectID := db.NewID(), db.NewID()
	must(t, w.d, func(tx db.Tx) (int, error) {
		madeOrg, madeProject, err := iam.Adopt(t.Context(), tx, orgID, w.org.Slug, projectID, start())
		require.NoError(t, err)
		require.True(t, madeOrg)
		require.True(t, madeProject)
		return 0, err
	})
	project := must(t, w.d, func(tx db.Tx) (iam.Project, error) { return iam.GetProject(t.Context(), tx, projectID) })
	require.Equal(t, orgID, project.OrgID)
	require.NotEqual(t, w.org.Slug, project.OrgSlug)
}
