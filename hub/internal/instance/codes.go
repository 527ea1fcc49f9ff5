package instance

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeAttached: other projects are attached to the app instance.
	codeAttached fault.Code = "instance_attached"
	// codeAttachmentExists: the project has the app instance already.
	codeAttachmentExists fault.Code = "attachment_exists"
	// codeMemberBounds: the app instance has as many or as few members as the version allows.
	codeMemberBounds fault.Code = "member_bounds"
	// codeMemberBusy: the status of the member does not allow that.
	codeMemberBusy fault.Code = "member_busy"
	// codeMemberOfNode: the member's node runs it, and no external worker.
	codeMemberOfNode fault.Code = "member_of_node"
	// codeNotShared: the app instance is its project's alone.
	codeNotShared fault.Code = "instance_not_shared"
	// codeTaskUnsupported: the version's external worker knows no task of this kind.
	codeTaskUnsupported fault.Code = "task_unsupported"
)
