package state

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeNoContainer: the node has no container of the workload.
	codeNoContainer fault.Code = "no_container"
	// codeNoService: the workload has no service of this name.
	codeNoService fault.Code = "no_service"
	// codePortsExhausted: no port of the agent's range is free.
	codePortsExhausted fault.Code = "ports_exhausted"
	// codeStateFormat: another release wrote the state in a form that this one does not read.
	codeStateFormat fault.Code = "state_format"
	// codeStateOfAnotherNode: the state directory belongs to another node.
	codeStateOfAnotherNode fault.Code = "state_of_another_node"
	// codeStateUnreadable: the stored state is damaged.
	codeStateUnreadable fault.Code = "state_unreadable"
	// codeStateUnusable: the state directory or a file in it cannot be used.
	codeStateUnusable fault.Code = "state_unusable"
	// codeStateWriteFailed: the state could not be written; nothing was changed.
	codeStateWriteFailed fault.Code = "state_write_failed"
)
