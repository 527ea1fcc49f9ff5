package artifact

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeArtifactExists: another project has registered the digest for this version.
	codeArtifactExists fault.Code = "artifact_exists"
	// CodeNotPushed: the registry does not hold the digest in the repository.
	CodeNotPushed fault.Code = "artifact_not_pushed"
	// CodeNotVerified: an image of the version is not registered and verified.
	CodeNotVerified fault.Code = "artifact_not_verified"
	// codeArtifactRetired: the artifact was retired.
	codeArtifactRetired fault.Code = "artifact_retired"
	// codeArtifactRevoked: the artifact was revoked.
	codeArtifactRevoked fault.Code = "artifact_revoked"
	// codeNotPromotable: the artifact cannot be promoted to the channel.
	codeNotPromotable fault.Code = "artifact_not_promotable"
	// CodeUnsupported: the artifact is of a kind that cannot be run.
	CodeUnsupported fault.Code = "artifact_unsupported"
	// codeDigestMalformed: the digest is not of the form sha256:<hex>.
	codeDigestMalformed fault.Code = "digest_malformed"
	// CodeIntentEnded: the publish intent has ended.
	CodeIntentEnded fault.Code = "publish_intent_ended"
	// codeRegistryUnavailable: the registry's directory cannot be used.
	codeRegistryUnavailable fault.Code = "registry_unavailable"
	// codeTokenRequestMalformed: the request for a registry token cannot be read.
	codeTokenRequestMalformed fault.Code = "token_request_malformed"
)
