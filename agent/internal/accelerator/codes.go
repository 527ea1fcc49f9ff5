package accelerator

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeNoAccelerator: the machine has no such accelerator.
	codeNoAccelerator fault.Code = "accelerator_missing"
	// codeNotOutOfUse: the accelerator is neither quarantined nor does it wait for a reset.
	codeNotOutOfUse fault.Code = "accelerator_not_out_of_use"
)
