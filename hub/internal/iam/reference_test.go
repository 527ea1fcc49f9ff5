package iam

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/docs/reference"
	"github.com/gpuaas/gpuaas/hub/api"
)

// TestReferenceOfPermissions writes which role has which permission, and for which operations it is needed.
func TestReferenceOfPermissions(t *testing.T) {
	roles := roles()
	var doc struct {
		Paths      map[string]map[string]yaml.Node `yaml:"paths"`
		Components struct {
			Schemas map[string]struct {
				Enum []Role `yaml:"enum"`
			} `yaml:"schemas"`
		} `yaml:"components"`
	}
	require.NoError(t, yaml.Unmarshal(api.OpenAPI, &doc))
	user, project := doc.Components.Schemas["UserRole"].Enum, doc.Components.Schemas["ProjectRole"].Enum
	account := doc.Components.Schemas["ServiceAccountRole"].Enum
	require.ElementsMatch(t, roles, slices.Concat(user, project), "the contract has other roles")
	var rows [][]string
	for _, r := range roles {
		var holders []string
		for _, h := range []struct {
			roles  []Role
			may    func(Role) bool
			holder string
		}{
			{user, Role.ForUser, "users, in the org"},
			{project, Role.ForProject, "users, in a project"},
			{account, Role.ForServiceAccount, "service accounts"},
		} {
			require.Equal(t, slices.Contains(h.roles, r), h.may(r), r)
			if h.may(r) {
				holders = append(holders, h.holder)
			}
		}
		rows = append(rows, []string{reference.Code(string(r)), strings.Join(holders, "; ")})
	}
	reference.Check(t, "permissions.md", "roles", reference.Table([]string{"role", "is given to"}, rows))

	operations := map[Permission][]string{}
	for _, item := range doc.Paths {
		for _, node := range item {
			var o struct {
				ID         string     `yaml:"operationId"`
				Permission Permission `yaml:"x-permission"`
			}
			require.NoError(t, node.Decode(&o))
			if o.Permission != "" {
				operations[o.Permission] = append(operations[o.Permission], o.ID)
			}
		}
	}
	rows = nil
	for _, p := range Permissions() {
		var holders []string
		for _, r := range roles {
			if slices.Contains(r.Permissions(), p) {
				holders = append(holders, reference.Code(string(r)))
			}
		}
		slices.Sort(operations[p])
		for i, id := range operations[p] {
			operations[p][i] = reference.Code(id)
		}
		rows = append(rows, []string{reference.Code(p), strings.Join(holders, ", "), strings.Join(operations[p], ", ")})
		delete(operations, p)
	}
	require.Empty(t, operations, "permissions that iam does not know")
	table := reference.Table([]string{"permission", "roles", "operations"}, rows)
	reference.Check(t, "permissions.md", "permissions", table)
}
