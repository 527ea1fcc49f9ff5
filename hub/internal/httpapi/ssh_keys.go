package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
)

// GetOperatorSSHKeys gives the SSH keys of an allocation that its operators manage.
func (s *Server) GetOperatorSSHKeys(ctx context.Context,
	r GetOperatorSSHKeysRequestObject,
) (GetOperatorSSHKeysResponseObject, error) {
	set, err := s.Queries.SSHKeys(ctx, principalOf(ctx), r.ProjectID, r.AllocationID, capacity.SSHKeysOfOperator)
	return GetOperatorSSHKeys200JSONResponse(sshKeysView(set)), err
}

// PutOperatorSSHKeys replaces them.
func (s *Server) PutOperatorSSHKeys(ctx context.Context,
	r PutOperatorSSHKeysRequestObject,
) (PutOperatorSSHKeysResponseObject, error) {
	set, err := s.Commands.PutSSHKeys(ctx, metaFrom(ctx), r.ProjectID, r.AllocationID,
		sshKeySet(capacity.SSHKeysOfOperator, r.Body.Keys))
	return PutOperatorSSHKeys200JSONResponse(sshKeysView(set)), err
}

// GetAppSSHKeys gives the SSH keys of an allocation that its apps manage.
func (s *Server) GetAppSSHKeys(ctx context.Context, r GetAppSSHKeysRequestObject) (GetAppSSHKeysResponseObject, error) {
	set, err := s.Queries.SSHKeys(ctx, principalOf(ctx), r.ProjectID, r.AllocationID, capacity.SSHKeysOfApp)
	return GetAppSSHKeys200JSONResponse(sshKeysView(set)), err
}

// PutAppSSHKeys replaces them.
func (s *Server) PutAppSSHKeys(ctx context.Context, r PutAppSSHKeysRequestObject) (PutAppSSHKeysResponseObject, error) {
	set, err := s.Commands.PutSSHKeys(ctx, metaFrom(ctx), r.ProjectID, r.AllocationID,
		sshKeySet(capacity.SSHKeysOfApp, r.Body.Keys))
	return PutAppSSHKeys200JSONResponse(sshKeysView(set)), err
}

func sshKeySet(managedBy string, keys []SSHKey) capacity.SSHKeySet {
	return capacity.SSHKeySet{ManagedBy: managedBy, Keys: views(keys, func(k SSHKey) capacity.SSHKey {
		return capacity.SSHKey{User: k.User, PublicKey: k.PublicKey, ExpiresAt: k.ExpiresAt}
	})}
}

func sshKeysView(s capacity.SSHKeySet) SSHKeySet {
	return SSHKeySet{
		AllocationID:    s.AllocationID,
		ManagedBy:       SSHKeySetManagedBy(s.ManagedBy),
		ResourceVersion: s.ResourceVersion,
		UpdatedAt:       s.UpdatedAt,
		Keys: views(s.Keys, func(k capacity.SSHKey) SSHKeyEntry {
			return SSHKeyEntry{User: k.User, PublicKey: k.PublicKey, ExpiresAt: k.ExpiresAt, Fingerprint: k.Fingerprint()}
		}),
	}
}
