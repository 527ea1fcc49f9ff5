package agent

import (
	"errors"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Codes of faults that several packages of the agent make.
const (
	// CodeDiskFull: a file system of the node has no free space.
	CodeDiskFull = "disk_full"
	// CodeHubAway: the node has no session to the hub.
	CodeHubAway = "hub_away"

	// The codes of faults that are reported with a reason of their own; see ReasonOf.
	CodeFeatureMissing       = "feature_missing"
	CodeInsufficientCapacity = "insufficient_capacity"
	CodeDeviceFault          = "device_fault"
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
func IsDiskFull(err error) bool { return hasCode(err, CodeDiskFull) }

// IsHubAway reports whether err is the fault of a missing session to the hub.
func IsHubAway(err error) bool { return hasCode(err, CodeHubAway) }

func hasCode(err error, code string) bool {
	f, ok := errors.AsType[*fault.Error](err)
	return ok && f.Code == code
}
