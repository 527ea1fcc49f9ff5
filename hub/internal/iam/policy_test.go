package iam

import (
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// TestPoliciesAnswerAsTheTable compares Authorize with the table of roles that it had before there were policies, for
// every permission, wherever a principal may ask for it.
func TestPoliciesAnswerAsTheTable(t *testing.T) {
	for _, p := range principals() {
		for _, permission := range append(Permissions(), "made.up") {
			for _, at := range resources() {
				want, got := byTable(p, permission, at.org, at.project), Authorize(p, permission, at.org, at.project)
				require.Equal(t, want, got, "%+v %s %+v", p, permission, at)
			}
		}
	}
}

// TestPoliciesAnswerAsTheTableForManyRoles is the same for principals with several roles.
func TestPoliciesAnswerAsTheTableForManyRoles(t *testing.T) {
	role := rapid.SampledFrom(append(roles(), "none"))
	binding := rapid.Custom(func(t *rapid.T) Binding {
		return Binding{Role: role.Draw(t, "role"), ProjectID: rapid.SampledFrom([]string{"", "p1", "p2", "p3"}).Draw(t, "in")}
	})
	rapid.Check(t, func(t *rapid.T) {
		p := Principal{Type: principal.User, ID: "u", OrgID: "acme", Bindings: rapid.SliceOfN(binding, 0, 8).Draw(t, "held")}
		p.sortBindings()
		at := rapid.SampledFrom(resources()).Draw(t, "at")
		permission := rapid.SampledFrom(Permissions()).Draw(t, "permission")
		require.Equal(t, byTable(p, permission, at.org, at.project), Authorize(p, permission, at.org, at.project))
	})
}

// TestACustomRoleAnswersAsANamedOne with the same permissions.
func TestACustomRoleAnswersAsANamedOne(t *testing.T) {
	for _, named := range principals() {
		custom := named
		custom.Bindings = slices.Clone(named.Bindings)
		for i, b := range named.Bindings {
			custom.Bindings[i] = Binding{Role: "id of " + b.Role, ProjectID: b.ProjectID, Permissions: table(b.Role)}
		}
		for _, permission := range Permissions() {
			for _, at := range resources() {
				want, got := Authorize(named, permission, at.org, at.project), Authorize(custom, permission, at.org, at.project)
				require.Equal(t, want, got, "%+v %s %+v", custom, permission, at)
			}
		}
	}
}

func TestRolesHoldThePermissionsOfTheTable(t *testing.T) {
	for _, r := range roles() {
		require.Equal(t, table(r), r.Permissions(), r)
	}
}

func TestADecisionNamesItsRules(t *testing.T) {
	rules := func(p Principal, permission Permission, org, project string) (ids []string) {
		d, err := Decide(p, permission, org, project)
		require.NoError(t, err)
		for _, r := range d.Rules {
			ids = append(ids, r.ID)
			require.NotEmpty(t, r.Description)
		}
		return ids
	}
	p := Principal{
		Type: principal.User, ID: "u", OrgID: "acme",
		Bindings: []Binding{{Role: OrgBilling}, {Role: Viewer, ProjectID: "p1"}},
	}
	require.Equal(t, []string{"org_billing", "viewer"}, rules(p, InstanceRead, "acme", "p1"))
	require.Equal(t, []string{"org_billing"}, rules(p, InstanceRead, "acme", "p2"))
	require.Empty(t, rules(p, InstanceCreate, "acme", "p1"))
	require.Equal(t, []string{"tenant_boundary"}, rules(p, InstanceRead, "other", "p9"))
	p.Disabled = true
	require.Equal(t, []string{"disabled"}, rules(p, InstanceRead, "acme", "p1"))
	admin := Principal{Type: principal.User, ID: "a", PlatformAdmin: true}
	require.Equal(t, []string{"platform_admin"}, rules(admin, NodeWrite, "", ""))
}

func TestWhatThePlatformManagesIsOperatedByPlatformAdminsAlone(t *testing.T) {
	owner := Principal{Type: principal.User, ID: "u", OrgID: "acme", Bindings: []Binding{{Role: OrgAdmin}}}
	admin := Principal{Type: principal.User, ID: "a", PlatformAdmin: true}
	dedicated, managed := OnInstance{OperatingMode: "tenant_dedicated"}, OnInstance{OperatingMode: "platform_managed"}
	for permission, refused := range map[Permission]bool{
		InstanceStop: true, InstanceStart: true, InstanceUpgrade: true, InstanceRollback: true, InstanceExec: true,
		InstanceLogs: true, InstanceRead: false, InstanceConnect: false, InstanceDelete: false,
	} {
		err := AuthorizeOperation(owner, permission, "acme", "p1", managed)
		require.Equal(t, refused, fault.Is(err, fault.Forbidden), permission)
		require.Equal(t, refused, err != nil, permission)
		require.NoError(t, AuthorizeOperation(owner, permission, "acme", "p1", dedicated), permission)
		require.NoError(t, AuthorizeOperation(admin, permission, "acme", "p1", managed), permission)
	}
}

func TestAnAttachedProjectConnectsAndDoesNotOperate(t *testing.T) {
	for _, p := range []Principal{
		{Type: principal.User, ID: "u", OrgID: "acme", Bindings: []Binding{{Role: OrgAdmin}}},
		{Type: principal.User, ID: "a", PlatformAdmin: true},
	} {
		for _, permission := range Permissions() {
			err := AuthorizeOperation(p, permission, "acme", "p1", OnInstance{Attached: true})
			allowed := permission == InstanceConnect || permission == AttachmentRead || permission == AttachmentDelete
			require.Equal(t, !allowed, fault.Is(err, fault.Forbidden), permission)
		}
	}
}

// TestTheAccountOfAnAppInstanceWorksThatOneAlone: no other one, and nothing that is done to none.
func TestTheAccountOfAnAppInstanceWorksThatOneAlone(t *testing.T) {
	app := Principal{
		Type: principal.ServiceAccount, ID: "s", OrgID: "acme", ProjectID: "p1", AppInstanceID: "i1",
		Bindings: []Binding{{ProjectID: "p1"}},
	}
	other := app
	other.AppInstanceID = ""
	for _, permission := range Permissions() {
		works := permission == InstanceRead || permission == InstanceWork
		for id, own := range map[string]bool{"i1": true, "i2": false, "": false} {
			err := AuthorizeOperation(app, permission, "acme", "p1", OnInstance{ID: id})
			require.Equal(t, !works || !own, fault.Is(err, fault.Forbidden), "%s %s: %v", permission, id, err)
			err = AuthorizeOperation(other, permission, "acme", "p1", OnInstance{ID: id})
			require.True(t, fault.Is(err, fault.Forbidden), "%s %s: %v", permission, id, err)
		}
		require.Error(t, AuthorizeOperation(app, permission, "acme", "p2", OnInstance{ID: "i1"}), permission)
	}
}

func TestADisabledPrincipalMayNothing(t *testing.T) {
	for _, p := range principals() {
		p.Disabled = true
		for _, at := range resources() {
			d, err := Decide(p, InstanceRead, at.org, at.project)
			require.NoError(t, err)
			require.False(t, d.Allowed, "%+v %+v", p, at)
		}
	}
}

// TestAPolicyThatCannotBeEvaluatedDenies although another one permits it.
func TestAPolicyThatCannotBeEvaluatedDenies(t *testing.T) {
	for _, effect := range []string{"permit", "forbid"} {
		set, err := parsePolicies(slices.Concat(policyDocument,
			[]byte(`@id("broken") `+effect+` (principal, action, resource) when { principal.missing };`)))
		require.NoError(t, err)
		d, err := set.decide(Principal{Type: principal.User, ID: "a", PlatformAdmin: true}, NodeRead, "", "", OnInstance{})
		require.ErrorContains(t, err, "evaluate policy broken")
		require.False(t, d.Allowed)
	}
	_, err := parsePolicies([]byte("permit (principal, action"))
	require.Error(t, err)
}

func TestThePoliciesAreComplete(t *testing.T) {
	set, err := parsePolicies(policyDocument)
	require.NoError(t, err)
	var ids []string
	for _, p := range set {
		require.NotEmpty(t, p.Description, p.ID)
		ids = append(ids, p.ID)
	}
	require.Equal(t, []string{
		"platform_admin", "tenant_boundary", "disabled", "platform_managed", "attached", "known", "app_instance",
		"custom_role",
	}, ids[:8])
	var names []string
	for _, r := range roles() {
		names = append(names, string(r))
	}
	require.Equal(t, names, ids[8:])
	known := append(Permissions(), Know)
	for _, action := range regexp.MustCompile(`Action::"([^"]*)"`).FindAllStringSubmatch(string(policyDocument), -1) {
		require.Contains(t, known, action[1])
	}
	require.True(t, slices.IsSorted(Permissions()))
}

// principals has each kind of principal, with each role in each place.
func principals() []Principal {
	out := []Principal{
		{},
		{Type: "root", ID: "x", PlatformAdmin: true},
		{Type: principal.Node, ID: "n"},
		{Type: principal.User, ID: "u"},
		{Type: principal.User, ID: "u", OrgID: "acme"},
		{Type: principal.User, ID: "a", PlatformAdmin: true},
		{Type: principal.User, ID: "a", PlatformAdmin: true, OrgID: "acme", Bindings: []Binding{{Role: Viewer}}},
	}
	for _, r := range append(roles(), "none") {
		for _, held := range [][]Binding{
			{{Role: r}},
			{{Role: r, ProjectID: "p1"}},
			{{Role: r}, {Role: r, ProjectID: "p1"}},
			{{Role: r, ProjectID: "p1"}, {Role: r, ProjectID: "p2"}},
		} {
			out = append(out, Principal{Type: principal.User, ID: "u", OrgID: "acme", Bindings: held})
		}
		for _, pretends := range []bool{false, true} {
			out = append(out, Principal{
				Type: principal.ServiceAccount, ID: "s", OrgID: "acme", ProjectID: "p1", PlatformAdmin: pretends,
				Bindings: []Binding{{Role: r, ProjectID: "p1"}},
			})
		}
	}
	return out
}

type place struct{ org, project string }

// resources are the platform, the own org and another, projects of both, and a project of no org.
func resources() []place {
	return []place{{}, {org: "acme"}, {org: "other"}, {"acme", "p1"}, {"acme", "p2"}, {"other", "p9"}, {"", "p1"}}
}

// byTable is Authorize as it was before there were policies.
func byTable(p Principal, permission Permission, orgID, projectID string) error {
	if p.ID == "" || (p.Type != principal.User && p.Type != principal.ServiceAccount && p.Type != principal.Node) {
		return ErrUnauthenticated()
	}
	if p.PlatformAdmin && p.Type == principal.User {
		return nil
	}
	has := func(b Binding) bool { return slices.Contains(table(b.Role), permission) }
	if orgID == "" && projectID == "" {
		if slices.ContainsFunc(p.Bindings, has) {
			return nil
		}
		return forbidden(permission)
	}
	if p.OrgID == "" || orgID != p.OrgID {
		return ErrNotFound()
	}
	if p.Type == principal.ServiceAccount && projectID != "" && projectID != p.ProjectID {
		return ErrNotFound()
	}
	known := projectID == ""
	for _, b := range p.Bindings {
		if b.ProjectID != "" && b.ProjectID != projectID {
			continue
		}
		if has(b) {
			return nil
		}
		known = true
	}
	if known {
		return forbidden(permission)
	}
	return ErrNotFound()
}

// table is what the roles held before there were policies.
func table(r Role) []Permission {
	viewer := []Permission{
		InstanceRead, InstanceLogs, ArtifactRead, EntitlementRead, EnvironmentRead, CatalogRead, AllocationRead, VolumeRead,
		SecretRead, AccessCredentialRead, SKURead, UsageRead, PriceRead, OrgRead, ProjectRead,
		AttachmentRead,
	}
	operator := slices.Concat(viewer, []Permission{
		InstanceCreate, InstanceUpgrade, InstanceRollback, InstanceStop, InstanceStart, InstanceDelete,
		InstanceWork, InstanceMembers, InstanceExec, InstanceConnect, ArtifactPublish, EnvironmentManage, SecretManage,
		AccessCredentialManage, AttachmentCreate, AttachmentDelete,
		VolumeCreate, VolumeSnapshot, VolumeRestore,
		VolumeDelete, AppSSHKeyManage,
	})
	projectAdmin := slices.Concat(operator, []Permission{
		ArtifactManage, EntitlementWrite, AllocationCreate, AllocationRelease, ServiceAccountRead,
		ServiceAccountWrite, RoleRead, RoleWrite, SSHKeyManage,
	})
	held := map[Role][]Permission{
		OrgAdmin: slices.Concat(projectAdmin, []Permission{
			ProjectCreate, UserRead, UserManage, QuotaRead, LedgerRead, WalletRead, AuditRead, AuditExport,
			WebhookRead, WebhookWrite,
		}),
		OrgMember: slices.Concat(operator, []Permission{
			AllocationCreate, AllocationRelease, LedgerRead, WalletRead, SSHKeyManage,
		}),
		OrgBilling:   slices.Concat(viewer, []Permission{QuotaRead, LedgerRead, WalletRead}),
		ProjectAdmin: projectAdmin,
		AppOperator:  operator,
		AppPublisher: slices.Concat(viewer, []Permission{ArtifactPublish}),
		Viewer:       viewer,
	}[r]
	slices.Sort(held)
	return held
}
