package plan

import (
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/protocol"
)

// bundleLeap is added to the version at a new epoch. Nodes may hold newer bundles than the restored backup and accept
// only higher versions; nobody signs as many bundles between two backups.
const bundleLeap = 1000

// EpochRoles returns the roles whose keys each epoch replaces: those that sign what has an order.
func EpochRoles() []string { return []string{protocol.RoleState, protocol.RoleLease} }

// NextEpoch returns the bundle that begins the next epoch, without its dates: it revokes the keys of EpochRoles and
// adds the fresh ones, by role. Documents of the old epoch that arrive late are refused then, and so is a hub that
// continues it; accepted documents stay valid. Epoch and version are the time in Unix seconds, or the next number where
// that is higher: of two restores of one backup, nodes follow the second one.
func NextEpoch(bundle protocol.Bundle, fresh map[string][]*protocol.PublicKey, now time.Time) *protocol.TrustBundle {
	next, moment := bundle.Message(), uint64(max(now.Unix(), 0))
	next.Version = max(next.Version+bundleLeap, moment)
	next.Epoch = max(next.Epoch+1, moment)
	for _, role := range next.GetRoles() {
		if !slices.Contains(EpochRoles(), role.GetName()) {
			continue
		}
		for _, k := range bundle.Keys(role.GetName()) {
			next.RevokedKeyIds = append(next.RevokedKeyIds, k.GetKeyId())
		}
		role.Keys = append(role.Keys, fresh[role.GetName()]...)
	}
	return next
}
