package lifecycle

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeInstanceDecommissioned: no such action while the app instance is decommissioned.
	codeInstanceDecommissioned fault.Code = "instance_decommissioned"
	// codeInstanceDecommissioning: no such action while the app instance is being decommissioned.
	codeInstanceDecommissioning fault.Code = "instance_decommissioning"
	// codeInstanceDeploying: no such action while the app instance is being deployed.
	codeInstanceDeploying fault.Code = "instance_deploying"
	// codeInstanceFailed: no such action while the app instance has failed.
	codeInstanceFailed fault.Code = "instance_failed"
	// codeInstanceRequested: no such action while the app instance waits for its deployment.
	codeInstanceRequested fault.Code = "instance_requested"
	// codeInstanceRollingBack: no such action while the app instance is being rolled back.
	codeInstanceRollingBack fault.Code = "instance_rolling_back"
	// codeInstanceRunning: no such action while the app instance runs.
	codeInstanceRunning fault.Code = "instance_running"
	// codeInstanceStopped: no such action while the app instance is stopped.
	codeInstanceStopped fault.Code = "instance_stopped"
	// codeInstanceStopping: no such action while the app instance is being stopped.
	codeInstanceStopping fault.Code = "instance_stopping"
	// codeInstanceUpgrading: no such action while the app instance is being upgraded.
	codeInstanceUpgrading fault.Code = "instance_upgrading"
	// codeNoPreviousVersion: the app instance has no earlier version to go back to.
	codeNoPreviousVersion fault.Code = "no_previous_version"
	// codeTaskEnded: the task of the external worker has ended.
	codeTaskEnded fault.Code = "task_ended"
	// codeTaskFenced: the call comes from an attempt that does not hold the task.
	codeTaskFenced fault.Code = "task_fenced"
	// codeTaskHeld: another worker holds the task.
	codeTaskHeld fault.Code = "task_held"
	// codeTaskPhaseOrder: the phases of a task are reported in the order of the manifest, all of them.
	codeTaskPhaseOrder fault.Code = "task_phase_order"
	// codeTaskWaits: the task cannot begin before an earlier one has ended.
	codeTaskWaits fault.Code = "task_waits"
	// CodeVersionUnchanged: the app instance runs this version already.
	CodeVersionUnchanged fault.Code = "version_unchanged"
	// codeNodeLost: the node of the app instance is gone for good.
	codeNodeLost fault.Code = "node_lost"
)
