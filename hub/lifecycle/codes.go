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
	// codeNodeLost: the node of the app instance is gone for good.
	codeNodeLost fault.Code = "node_lost"
)
