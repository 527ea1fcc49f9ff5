package command_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/protocol"
)

// repeatable is a command that changes nothing where it was done before.
type repeatable struct {
	name string
	do   func(m command.Meta) error
}

// TestWhatWasDoneBeforeIsNoSecondEvent asks for each change twice, under keys of their own.
func TestWhatWasDoneBeforeIsNoSecondEvent(t *testing.T) {
	w := newWorld(t)
	w.Allocation()
	p, s := newPerson(w), w.Commands()
	s.Sealer = sealer(t)
	var steps []repeatable
	steps = append(steps, p.repeatableOfPeople(s)...)
	steps = append(steps, p.repeatableOfProjects(s)...)
	steps = append(steps, p.repeatableOfThePlatform(s)...)
	for _, step := range steps {
		require.NoError(t, step.do(w.Meta(step.name)), step.name)
		before := w.Contents()
		require.NoError(t, step.do(w.Meta(step.name+" again")), step.name)
		after := w.Contents()
		for table := range before {
			if !strings.HasPrefix(table, "idempotency") {
				require.Equal(t, before[table], after[table], "%s: %s", step.name, table)
			}
		}
	}
}

func (p *person) repeatableOfPeople(s *command.Service) []repeatable {
	ctx, id := p.T.Context(), p.user.ID
	role, err := s.CreateCustomRole(ctx, p.Meta("role"), iam.CustomRole{
		OrgID: p.Project.OrgID, Slug: "reader", DisplayName: "R", Permissions: []iam.Permission{iam.InstanceRead},
	})
	require.NoError(p.T, err)
	role.DisplayName = "Reader"
	return []repeatable{
		{"put role", func(m command.Meta) error { return second(s.PutCustomRole(ctx, m, role)) }},
		{"put user roles", func(m command.Meta) error {
			return second(s.PutUserRoles(ctx, m, id, iam.Roles{Named: []iam.Role{iam.OrgBilling}}, nil))
		}},
		{"put project roles", func(m command.Meta) error {
			return second(s.PutProjectRoles(ctx, m, p.Project.ID, id, iam.Roles{Named: []iam.Role{iam.ProjectAdmin}}))
		}},
		{"disable user", func(m command.Meta) error { return second(s.DisableUser(ctx, m, id)) }},
		{"enable user", func(m command.Meta) error { return second(s.EnableUser(ctx, m, id)) }},
		{"revoke tokens", func(m command.Meta) error { return s.RevokeUserTokens(ctx, m, id) }},
	}
}

func (p *person) repeatableOfProjects(s *command.Service) []repeatable {
	ctx, project := p.T.Context(), p.Project.ID
	account := p.account(s).Account.ID
	credential, err := s.CreateAccessCredential(ctx, p.Meta("credential"), project, "bootstrap")
	require.NoError(p.T, err)
	secret, err := s.CreateSecret(ctx, p.Meta("secret"), project, "hf", "x")
	require.NoError(p.T, err)
	retired, revoked := p.artifact("retired"), p.artifact("revoked")
	promoted, deprecated := p.artifact("promoted"), p.artifact("deprecated")
	v := p.volume("data")
	snapshot, err := s.CreateVolumeSnapshot(ctx, p.Meta("snapshot"), project, v.ID, "")
	require.NoError(p.T, err)
	p.reportVolume(&protocol.VolumeStatus{
		Id: v.ID, Status: protocol.VolumeStatus_READY,
		Snapshots: []*protocol.SnapshotStatus{{Id: snapshot.ID, Status: protocol.VolumeStatus_READY}},
	})
	return []repeatable{
		{"disable account", func(m command.Meta) error { return second(s.DisableServiceAccount(ctx, m, project, account)) }},
		{"revoke credential", func(m command.Meta) error {
			return second(s.RevokeAccessCredential(ctx, m, project, credential.Credential.ID))
		}},
		{"revoke secret", func(m command.Meta) error { return second(s.RevokeSecret(ctx, m, project, secret.ID)) }},
		{"promote artifact", func(m command.Meta) error {
			return second(s.PromoteArtifact(ctx, m, project, promoted.ID, "prod", "r"))
		}},
		{"deprecate artifact", func(m command.Meta) error {
			return second(s.DeprecateArtifact(ctx, m, project, deprecated.ID, "r"))
		}},
		{"retire artifact", func(m command.Meta) error { return second(s.RetireArtifact(ctx, m, project, retired.ID, "r")) }},
		{"revoke artifact", func(m command.Meta) error { return second(s.RevokeArtifact(ctx, m, project, revoked.ID, "r")) }},
		{"resize volume", func(m command.Meta) error {
			return second(s.ResizeVolume(ctx, m, project, v.ID, v.SizeBytes))
		}},
		{"delete snapshot", func(m command.Meta) error {
			return second(s.DeleteVolumeSnapshot(ctx, m, project, v.ID, snapshot.ID))
		}},
		{"delete volume", func(m command.Meta) error { return second(s.DeleteVolume(ctx, m, project, v.ID)) }},
	}
}

// repeatableOfThePlatform are those of platform admins.
func (p *person) repeatableOfThePlatform(s *command.Service) []repeatable {
	ctx := p.T.Context()
	_, err := s.CreateSKU(ctx, p.Admin("sku"), smallSKU())
	require.NoError(p.T, err)
	admin := p.Admin("").Principal
	as := func(do func(m command.Meta) error) func(m command.Meta) error {
		return func(m command.Meta) error {
			m.Principal = admin
			return do(m)
		}
	}
	return []repeatable{
		{"retire SKU", as(func(m command.Meta) error { return second(s.RetireSKU(ctx, m, smallSKU().Slug)) })},
		{"transfer slug", as(func(m command.Meta) error { return second(s.TransferAppSlug(ctx, m, "spare", "")) })},
		{"drain node", as(func(m command.Meta) error { return s.DrainNode(ctx, m, p.Node) })},
		{"undrain node", as(func(m command.Meta) error { return s.UndrainNode(ctx, m, p.Node) })},
		{"release node", as(func(m command.Meta) error { return s.ReleaseNode(ctx, m, p.Node) })},
		{"ban node", as(func(m command.Meta) error { return s.BanNode(ctx, m, p.Node, "stolen") })},
	}
}
