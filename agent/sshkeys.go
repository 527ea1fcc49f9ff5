package agent

import (
	"strings"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/protocol"
)

// AuthorizedKeys returns the lines of authorized_keys with which tenants log in to an account of the machine: the keys
// of the state that have not expired, where the owner allows that account and their org. An account that two projects
// have keys of lets nobody in.
func AuthorizedKeys(state protocol.Verified[*protocol.DesiredState], p policy.Policy, user string,
	now time.Time,
) []string {
	lines := []string{}
	if !state.OK() {
		return lines
	}
	project := ""
	for _, k := range state.Message().GetSshKeys() {
		if k.GetUser() != user {
			continue
		}
		if project != "" && k.GetProjectId() != project {
			return []string{}
		}
		project = k.GetProjectId()
		key, err := ssh.ParsePublicKey(k.GetPublicKey())
		expired := k.GetExpiresAt() != nil && !now.Before(k.GetExpiresAt().AsTime())
		if err != nil || expired || !p.AdmitsLogin(user, k.GetOrgSlug()) {
			continue
		}
		lines = append(lines, strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key))))
	}
	return lines
}
