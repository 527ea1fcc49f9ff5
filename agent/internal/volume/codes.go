package volume

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Codes of the faults of this package.
const (
	// codeFailed: the node cannot make or mount the volume.
	codeFailed fault.Code = "volume_failed"
	// codeEnvironmentFailed: the node cannot make or mount the environment.
	codeEnvironmentFailed fault.Code = "environment_failed"
	// codeBadVolume: the name or the size of a volume is not valid.
	codeBadVolume fault.Code = "bad_volume"
)

// failed is the fault of an operation; one that has a fault already keeps it.
func failed(what string, err error) error { return failure(codeFailed, what+" a volume", err) }

// failure is the fault of what the node could not do.
func failure(code fault.Code, what string, err error) error {
	if _, is := errors.AsType[*fault.Error](err); is || errors.Is(err, context.Canceled) {
		return err
	}
	if errors.Is(err, unix.ENOSPC) {
		return fault.New(fault.Unavailable, fault.CodeDiskFull, "The node's disk is full.", err)
	}
	return fault.New(fault.Unavailable, code, "The node cannot "+what+".", err)
}
