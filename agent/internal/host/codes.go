package host

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeBinaryMissing: programs that a node needs are not installed.
	codeBinaryMissing fault.Code = "binary_missing"
	// codeKernelFeatureMissing: the kernel lacks a feature that a node needs.
	codeKernelFeatureMissing fault.Code = "kernel_feature_missing"
	// codeNotRoot: the agent does not run as root.
	codeNotRoot fault.Code = "not_root"
)
