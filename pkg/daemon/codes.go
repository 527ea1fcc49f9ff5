package daemon

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeEnvironmentInvalid: an environment variable has no usable value, or belongs to no flag.
	codeEnvironmentInvalid fault.Code = "environment_invalid"
)
