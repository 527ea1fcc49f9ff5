package instance

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeNoPreviousVersion: the app instance has no earlier version to go back to.
	codeNoPreviousVersion fault.Code = "no_previous_version"
	// codeTaskUnsupported: the version's external worker knows no task of this kind.
	codeTaskUnsupported fault.Code = "task_unsupported"
	// codeVersionUnchanged: the app instance runs this version already.
	codeVersionUnchanged fault.Code = "version_unchanged"
)
