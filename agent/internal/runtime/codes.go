package runtime

import (
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Codes of the faults of this package.
const (
	// codeApparmorUnavailable: the AppArmor profile of containers cannot be loaded.
	codeApparmorUnavailable fault.Code = "apparmor_unavailable"
	// codeBadCommand: the image does not hold the command, or the service's user may not run it.
	codeBadCommand fault.Code = "bad_command"
	// codeBadConfiguration: the configuration of the runtime is not valid.
	codeBadConfiguration fault.Code = "bad_configuration"
	// codeBadWorkload: the agent cannot run a workload of this form.
	codeBadWorkload fault.Code = "bad_workload"
	// codeContainerMissing: the container does not exist or does not run.
	codeContainerMissing fault.Code = "container_missing"
	// codeContainerUnknown: the container does not answer at present.
	codeContainerUnknown fault.Code = "container_unknown"
	// codeCopiesBusy: as many copies of files run as the node allows.
	codeCopiesBusy fault.Code = "copies_busy"
	// codeCopyFailed: the process of a copy was ended.
	codeCopyFailed fault.Code = "copy_failed"
	// codeImageDigestMismatch: the content of an image does not match its digest.
	codeImageDigestMismatch fault.Code = "image_digest_mismatch"
	// codeImageMissing: the image is not on the node yet.
	codeImageMissing fault.Code = "image_missing"
	// codeLogMissing: the node holds no log of the container.
	codeLogMissing fault.Code = "log_missing"
	// codeRunEnded: the run has ended; a new run needs its own id.
	codeRunEnded fault.Code = "run_ended"
	// codeRuncUnavailable: runc cannot be run.
	codeRuncUnavailable fault.Code = "runc_unavailable"
	// codeSnapshotterUnavailable: containerd cannot use its snapshotter.
	codeSnapshotterUnavailable fault.Code = "snapshotter_unavailable"
	// codeStartFailed: the container could not be started.
	codeStartFailed fault.Code = "start_failed"
	// codeStopFailed: a killed process of the container does not end.
	codeStopFailed fault.Code = "stop_failed"
	// codeNoUserNamespaces: the kernel gives no user namespaces.
	codeNoUserNamespaces fault.Code = protocol.ConditionNoUserNamespaces
	// codeNoSeccomp: the kernel has no seccomp filters.
	codeNoSeccomp fault.Code = protocol.ConditionNoSeccomp
	// codeImagePullFailed: the image cannot be pulled.
	codeImagePullFailed fault.Code = "image_pull_failed"
)
