package command

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeAppSlugInUse: versions, artifacts or open publish intents exist under the slug.
	codeAppSlugInUse fault.Code = "app_slug_in_use"
	// codeAppVersionInUse: app instances have the version.
	codeAppVersionInUse fault.Code = "app_version_in_use"
	// codeArtifactInUse: a version or an app instance uses the artifact.
	codeArtifactInUse fault.Code = "artifact_in_use"
	// codeCredentialRevoked: the access credential has ended.
	codeCredentialRevoked fault.Code = "access_credential_revoked"
	// codeDelegationRefused: the signed delegation does not verify.
	codeDelegationRefused fault.Code = "delegation_refused"
	// codeETagStale: the resource has another version than the caller wants to change.
	codeETagStale fault.Code = "etag_stale"
	// codeNoIdentityProvider: the hub has no identity provider.
	codeNoIdentityProvider fault.Code = "no_identity_provider"
	// codeManifestRefused: the signed manifest does not verify.
	codeManifestRefused fault.Code = "manifest_refused"
	// codeMemberLimitExceeded: what a node would hold of the app instance exceeds a limit.
	codeMemberLimitExceeded fault.Code = "member_limit_exceeded"
	// codeMembersOutOfBounds: the version allows another number of members.
	codeMembersOutOfBounds fault.Code = "members_out_of_bounds"
	// codeReasonUnknown: no worker can give this reason for a failure.
	codeReasonUnknown fault.Code = "reason_unknown"
	// codeModeUnsupported: the version does not support the modes that the app instance runs in.
	codeModeUnsupported fault.Code = "mode_unsupported"
	// codeNoSession: the credential belongs to no session.
	codeNoSession fault.Code = "no_session"
	// codeNodeInUse: allocations are held on the node.
	codeNodeInUse fault.Code = "node_in_use"
	// codeNodeOwesUsage: the node has not handed over all usage of what ran there.
	codeNodeOwesUsage fault.Code = "node_owes_usage"
	// codeNodeRecovering: the node of the app instance has not returned since the hub was restored.
	codeNodeRecovering fault.Code = "node_recovering"
	// codeOrgUnknown: the request names an org that does not exist.
	codeOrgUnknown fault.Code = "org_unknown"
	// codePlacementManaged: the platform places what it manages.
	codePlacementManaged fault.Code = "placement_managed"
	// codeSecretExists: the project has a secret of this name.
	codeSecretExists fault.Code = "secret_exists"
	// codeSecretRevoked: the secret has no value any more.
	codeSecretRevoked fault.Code = "secret_revoked"
	// codeSecretUnknown: a parameter refers to a secret that cannot be delivered.
	codeSecretUnknown fault.Code = "secret_unknown"
	// codeSnapshotUnknown: the volume has no snapshot of this id.
	codeSnapshotUnknown fault.Code = "volume_snapshot_unknown"
	// codeVolumeUnknown: a volume named at the launch is not in this project.
	codeVolumeUnknown fault.Code = "volume_unknown"
	// codeSSHKeysUnsupported: the agent of the node is too old to serve SSH keys.
	codeSSHKeysUnsupported fault.Code = "ssh_keys_unsupported"
	// codeVolumesUnsupported: the node cannot keep volumes of projects.
	codeVolumesUnsupported fault.Code = "volumes_unsupported"
	// codeWrappingTokenExpired: nobody used the wrapping token in time.
	codeWrappingTokenExpired fault.Code = "wrapping_token_expired"
	// codeWrappingTokenUsed: the wrapping token was used before.
	codeWrappingTokenUsed fault.Code = "wrapping_token_used"
	// codeRepositoryWrong: the artifact lies in another repository.
	codeRepositoryWrong fault.Code = "repository_wrong"
)
