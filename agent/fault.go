package agent

import (
	"errors"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Codes of faults that several packages of the agent make.
const (
	// CodeHubAway: the node has no session to the hub.
	CodeHubAway fault.Code = "hub_away"
	// CodeContainerdUnavailable: containerd does not answer on its socket.
	CodeContainerdUnavailable fault.Code = "containerd_unavailable"

	// The codes of faults that are reported with a reason of their own; see ReasonOf.

	// CodeFeatureMissing: the agent lacks a feature that the workload needs.
	CodeFeatureMissing fault.Code = "feature_missing"
	// CodeInsufficientCapacity: the node lacks capacity that the workload needs.
	CodeInsufficientCapacity fault.Code = "insufficient_capacity"
	// CodeDeviceFault: an accelerator of the workload is faulty.
	CodeDeviceFault fault.Code = "device_fault"
)

// ReasonOf returns the reason of the status of a workload that failed with err; unspecified where the fault has no
// reason of its own.
func ReasonOf(err error) protocol.WorkloadStatus_Reason {
	switch {
	case hasCode(err, CodeFeatureMissing):
		return protocol.WorkloadStatus_FEATURE_MISSING
	case hasCode(err, CodeInsufficientCapacity):
		return protocol.WorkloadStatus_INSUFFICIENT_CAPACITY
	case hasCode(err, CodeDeviceFault):
		return protocol.WorkloadStatus_DEVICE_FAULT
	default:
		return protocol.WorkloadStatus_REASON_UNSPECIFIED
	}
}

// IsDiskFull reports whether err is the fault of a full disk.
func IsDiskFull(err error) bool { return hasCode(err, fault.CodeDiskFull) }

// IsHubAway reports whether err is the fault of a missing session to the hub.
func IsHubAway(err error) bool { return hasCode(err, CodeHubAway) }

func hasCode(err error, code fault.Code) bool {
	f, ok := errors.AsType[*fault.Error](err)
	return ok && f.Code == code
}
