package secret

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeKeyFile: the key file cannot be used.
	codeKeyFile fault.Code = "key_file"
	// codeTooMany: the project has as many secrets as it may have.
	codeTooMany fault.Code = "too_many_secrets"
)
