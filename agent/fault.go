package agent

import (
	"errors"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Codes of faults that several packages of the agent make.
const (
	// CodeHubAway: the node has no session to the hub.
	CodeHubAway fault.Code = "hub_away"
	// CodeContainerdUnavailable: containerd does not answer on its socket.
	CodeContainerdUnavailable fault.Code = "containerd_unavailable"
	// CodeFeatureMissing: the agent lacks a feature that the workload needs.
	CodeFeatureMissing fault.Code = "feature_missing"
	// CodeAcceleratorUnusable: an accelerator is missing, faulty or partitioned, or its driver does not answer.
	CodeAcceleratorUnusable fault.Code = "accelerator_unusable"
	// CodeAcceleratorInUse: another container holds the accelerator.
	CodeAcceleratorInUse fault.Code = "accelerator_in_use"
	// CodePortTaken: a port of the node is in use.
	CodePortTaken fault.Code = "port_taken"
	// CodeVolumeNoSpace: the node has no room for the volume or its snapshot.
	CodeVolumeNoSpace fault.Code = "volume_no_space"
	// CodeVolumeInUse: a container uses the volume.
	CodeVolumeInUse fault.Code = "volume_in_use"
	// CodeEnvironmentInUse: a workload of the state names the environment.
	CodeEnvironmentInUse fault.Code = "environment_in_use"
	// CodeVolumeNotReady: the node does not have the project's volume.
	CodeVolumeNotReady fault.Code = "volume_not_ready"
	// CodeSecretUnreadable: a secret parameter does not open with the node's key.
	CodeSecretUnreadable fault.Code = "secret_unreadable"
)

// IsAcceleratorUnusable reports whether err is the fault of an accelerator that cannot be used.
func IsAcceleratorUnusable(err error) bool { return hasCode(err, CodeAcceleratorUnusable) }

// IsAcceleratorInUse reports whether err is the fault of an accelerator that another container holds.
func IsAcceleratorInUse(err error) bool { return hasCode(err, CodeAcceleratorInUse) }

// IsFeatureMissing reports whether err is the fault of a feature that the agent lacks.
func IsFeatureMissing(err error) bool { return hasCode(err, CodeFeatureMissing) }

// IsPortTaken reports whether err is the fault of a port of the node that is in use.
func IsPortTaken(err error) bool { return hasCode(err, CodePortTaken) }

// lacksVolume reports whether err is the fault of a volume for which the node has no room, that another one uses, or
// that the node has yet to make.
func lacksVolume(err error) bool {
	return hasCode(err, CodeVolumeNoSpace) || hasCode(err, CodeVolumeInUse) || hasCode(err, CodeVolumeNotReady)
}

// IsDiskFull reports whether err is the fault of a full disk.
func IsDiskFull(err error) bool { return hasCode(err, fault.CodeDiskFull) }

// IsHubAway reports whether err is the fault of a missing session to the hub.
func IsHubAway(err error) bool { return hasCode(err, CodeHubAway) }

func hasCode(err error, code fault.Code) bool {
	f, ok := errors.AsType[*fault.Error](err)
	return ok && f.Code == code
}
