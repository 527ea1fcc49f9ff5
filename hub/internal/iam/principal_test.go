package iam_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestAuthorize(t *testing.T) {
	const allowed = fault.Kind(255)
	admin := iam.Principal{Type: principal.User, ID: "a", PlatformAdmin: true}
	orgAdmin := iam.Principal{Type: principal.User, ID: "o", OrgID: "acme", Bindings: []iam.Binding{{Role: iam.OrgAdmin}}}
	billing := iam.Principal{Type: principal.User, ID: "b", OrgID: "acme", Bindings: []iam.Binding{{Role: iam.OrgBilling}}}
	narrow := iam.Principal{
		Type: principal.User, ID: "n", OrgID: "acme",
		Bindings: []iam.Binding{{Role: iam.ProjectAdmin, ProjectID: "p1"}},
	}
	robot := iam.Principal{
		Type: principal.ServiceAccount, ID: "s", OrgID: "acme", ProjectID: "p1",
		Bindings: []iam.Binding{{Role: iam.AppOperator, ProjectID: "p1"}},
	}
	pretender := robot
	pretender.PlatformAdmin = true
	for name, c := range map[string]struct {
		p            iam.Principal
		perm         iam.Permission
		org, project string
		want         fault.Kind
	}{
		"platform admin anywhere":           {admin, iam.InstanceCreate, "acme", "p1", allowed},
		"platform admin, platform":          {admin, iam.NodeWrite, "", "", allowed},
		"org admin in the own org":          {orgAdmin, iam.EntitlementWrite, "acme", "p1", allowed},
		"org admin elsewhere":               {orgAdmin, iam.InstanceRead, "other", "p9", fault.NotFound},
		"org admin on nodes":                {orgAdmin, iam.NodeRead, "", "", fault.Forbidden},
		"org admin cannot grant credit":     {orgAdmin, iam.CreditGrant, "acme", "", fault.Forbidden},
		"org admin reads the catalogue":     {orgAdmin, iam.CatalogRead, "", "", allowed},
		"billing may read the ledger":       {billing, iam.LedgerRead, "acme", "", allowed},
		"billing may not deploy":            {billing, iam.InstanceCreate, "acme", "p1", fault.Forbidden},
		"project admin in the project":      {narrow, iam.InstanceCreate, "acme", "p1", allowed},
		"project admin, neighbour project":  {narrow, iam.InstanceRead, "acme", "p2", fault.NotFound},
		"project admin, whole org":          {narrow, iam.LedgerRead, "acme", "", fault.Forbidden},
		"service account in its project":    {robot, iam.InstanceCreate, "acme", "p1", allowed},
		"service account, neighbour":        {robot, iam.InstanceRead, "acme", "p2", fault.NotFound},
		"service account, other org":        {robot, iam.InstanceRead, "other", "p1", fault.NotFound},
		"service account, entitlement":      {robot, iam.EntitlementWrite, "acme", "p1", fault.Forbidden},
		"service account, accounts":         {robot, iam.ServiceAccountWrite, "acme", "p1", fault.Forbidden},
		"service account is never an admin": {pretender, iam.NodeWrite, "", "", fault.Forbidden},
		"zero principal":                    {iam.Principal{}, iam.CatalogRead, "", "", fault.Unauthenticated},
		"made-up type": {
			iam.Principal{Type: "root", ID: "x", PlatformAdmin: true},
			iam.CatalogRead, "", "", fault.Unauthenticated,
		},
		"node": {
			iam.Principal{Type: principal.Node, ID: "n"},
			iam.InstanceRead, "acme",
			"p1", fault.NotFound,
		},
		"user without org": {
			iam.Principal{Type: principal.User, ID: "u"},
			iam.InstanceRead, "", "p1",
			fault.NotFound,
		},
		"user without roles sees not even the place": {
			iam.Principal{Type: principal.User, ID: "u", OrgID: "acme"},
			iam.InstanceRead, "acme", "p1", fault.NotFound,
		},
	} {
		err := iam.Authorize(c.p, c.perm, c.org, c.project)
		if c.want == allowed {
			require.NoError(t, err, name)
			continue
		}
		require.True(t, fault.Is(err, c.want), "%s: %v", name, err)
	}
}

func TestNoServiceAccountRoleChangesWhoMayDoWhat(t *testing.T) {
	for _, r := range []iam.Role{iam.AppOperator, iam.AppPublisher, iam.Viewer} {
		require.True(t, r.ForServiceAccount())
		for _, p := range []iam.Permission{
			iam.EntitlementWrite, iam.ServiceAccountWrite, iam.UserWrite, iam.OrgCreate,
			iam.ProjectCreate, iam.ArtifactManage, iam.CatalogManage,
		} {
			require.NotContains(t, r.Permissions(), p)
		}
	}
	require.Empty(t, iam.Role("nonsense").Permissions())
	require.False(t, iam.ProjectAdmin.ForServiceAccount())
}
