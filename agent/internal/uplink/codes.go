package uplink

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeAPIURLInvalid: the hub's address is not an https URL.
	codeAPIURLInvalid fault.Code = "api_url_invalid"
	// codeCertificateInvalid: the hub issued a certificate that does not fit the node's key.
	codeCertificateInvalid fault.Code = "certificate_invalid"
	// codeEnrollmentIncomplete: a flag that enrollment needs is missing.
	codeEnrollmentIncomplete fault.Code = "enrollment_incomplete"
	// codeHubAnswerInvalid: the answer is not one of a hub.
	codeHubAnswerInvalid fault.Code = "hub_answer_invalid"
	// codeHubCertificateExpired: the hub's certificate is not valid at this machine's time.
	codeHubCertificateExpired fault.Code = "hub_certificate_expired"
	// codeHubError: the hub refused a request without saying a code.
	codeHubError fault.Code = "hub_error"
	// codeHubNotTrusted: the server at the hub's address does not belong to this mesh.
	codeHubNotTrusted fault.Code = "hub_not_trusted"
	// codeHubUnreachable: the hub's address does not answer.
	codeHubUnreachable fault.Code = "hub_unreachable"
	// codeIdentityUnusable: the files of the node's identity cannot be used.
	codeIdentityUnusable fault.Code = "identity_unusable"
	// codePortUnknown: the node publishes no such port of the workload.
	codePortUnknown fault.Code = "port_unknown"
	// codePullCredentialMissing: the hub gives no credential for an image.
	codePullCredentialMissing fault.Code = "pull_credential_missing"
	// codeRootFingerprintInvalid: the root fingerprint is not well-formed.
	codeRootFingerprintInvalid fault.Code = "root_fingerprint_invalid"
	// codeTrustBundleConflict: the stored trust bundle does not lead to the hub's.
	codeTrustBundleConflict fault.Code = "trust_bundle_conflict"
	// codeTrustBundleInvalid: the hub's trust bundle is not valid.
	codeTrustBundleInvalid fault.Code = "trust_bundle_invalid"
)
