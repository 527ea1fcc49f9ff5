package agent

import (
	"errors"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Codes of faults that several packages of the agent make and that pass without a change to the workload.
const (
	// CodeDiskFull: a file system of the node has no free space.
	CodeDiskFull = "disk_full"
	// CodeHubAway: the node has no session to the hub.
	CodeHubAway = "hub_away"
)

// IsDiskFull reports whether err is the fault of a full disk.
func IsDiskFull(err error) bool { return hasCode(err, CodeDiskFull) }

// IsHubAway reports whether err is the fault of a missing session to the hub.
func IsHubAway(err error) bool { return hasCode(err, CodeHubAway) }

func hasCode(err error, code string) bool {
	f, ok := errors.AsType[*fault.Error](err)
	return ok && f.Code == code
}
