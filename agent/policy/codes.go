package policy

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codePolicyInvalid: the owner's policy is not valid.
	codePolicyInvalid fault.Code = "policy_invalid"
)
