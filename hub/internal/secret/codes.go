package secret

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeKeyFile: the key file cannot be used.
	codeKeyFile fault.Code = "key_file"
)
