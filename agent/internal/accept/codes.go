package accept

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeDocumentMissing: a document that the desired state names has not arrived.
	codeDocumentMissing fault.Code = "document_missing"
	// CodeRootFingerprintMismatch: the root of trust differs from the pinned fingerprint.
	CodeRootFingerprintMismatch fault.Code = "root_fingerprint_mismatch"
)
