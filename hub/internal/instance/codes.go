package instance

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeMemberBounds: the app instance has as many or as few members as the version allows.
	codeMemberBounds fault.Code = "member_bounds"
	// codeMemberBusy: the status of the member does not allow that.
	codeMemberBusy fault.Code = "member_busy"
	// codeNoPreviousVersion: the app instance has no earlier version to go back to.
	codeNoPreviousVersion fault.Code = "no_previous_version"
	// codeTaskUnsupported: the version's external worker knows no task of this kind.
	codeTaskUnsupported fault.Code = "task_unsupported"
	// codeVersionUnchanged: the app instance runs this version already.
	codeVersionUnchanged fault.Code = "version_unchanged"
)
