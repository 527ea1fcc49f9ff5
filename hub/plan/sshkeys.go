package plan

import (
	"bytes"
	"cmp"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/protocol"
)

func sortedSSHKeys(snap Snapshot) []*protocol.SSHKey {
	if snap.Node.Banned {
		return nil
	}
	return slices.SortedFunc(slices.Values(snap.SSHKeys), func(a, b *protocol.SSHKey) int {
		return cmp.Or(cmp.Compare(a.GetAllocationId(), b.GetAllocationId()), cmp.Compare(a.GetManagedBy(), b.GetManagedBy()),
			cmp.Compare(a.GetUser(), b.GetUser()), bytes.Compare(a.GetPublicKey(), b.GetPublicKey()))
	})
}

type sshKeyID struct{ allocationID, managedBy, user, publicKey string }

func idOf(k *protocol.SSHKey) sshKeyID {
	return sshKeyID{k.GetAllocationId(), k.GetManagedBy(), k.GetUser(), string(k.GetPublicKey())}
}

// sshKeys checks that the state names the keys of the node's allocations, and that each account has those of one
// project.
func (c *checker) sshKeys() {
	if len(c.state.SSHKeys) > protocol.MaxSSHKeys {
		c.add(RuleTooMany, c.state.NodeID)
	}
	if c.snap.Node.Banned && len(c.state.SSHKeys) > 0 {
		c.add(RuleBanned, c.state.NodeID)
	}
	if !c.snap.Node.Banned && len(c.snap.SSHKeys) != len(c.state.SSHKeys) {
		c.add(RuleSSHKeys, c.state.NodeID)
	}
	projects := map[string]string{}
	for _, a := range c.snap.Allocations {
		projects[a.ID] = a.ProjectID
	}
	known := map[sshKeyID]*protocol.SSHKey{}
	for _, k := range c.snap.SSHKeys {
		known[idOf(k)] = k
	}
	accounts := map[string]string{}
	for _, k := range c.state.SSHKeys {
		if !proto.Equal(k, known[idOf(k)]) {
			c.add(RuleSSHKeys, k.GetAllocationId())
		}
		switch project, known := projects[k.GetAllocationId()]; {
		case !known:
			c.add(RuleAllocationUnknown, k.GetAllocationId())
		case project != k.GetProjectId():
			c.add(RuleAllocationForeign, k.GetAllocationId())
		}
		if other, known := accounts[k.GetUser()]; known && other != k.GetProjectId() {
			c.add(RuleSSHAccountShared, k.GetUser())
		}
		accounts[k.GetUser()] = k.GetProjectId()
	}
}

// withGoodSSHKeys leaves all SSH keys out where they break a rule: nobody logs in, and the workloads change all the
// same.
func withGoodSSHKeys(snap Snapshot) Snapshot {
	c := checker{snap: snap, state: NodeState{NodeID: snap.Node.ID, SSHKeys: sortedSSHKeys(snap)}}
	if c.sshKeys(); c.err() != nil {
		snap.SSHKeys = nil
	}
	return snap
}
