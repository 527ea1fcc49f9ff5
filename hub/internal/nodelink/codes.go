package nodelink

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeAppUnavailable: the app does not answer on its node.
	codeAppUnavailable fault.Code = "app_unavailable"
	// codeInUse: an app instance uses what is to be removed from its node.
	codeInUse fault.Code = "environment_in_use"
	// codeNodeRefused: the node refused the stream.
	codeNodeRefused fault.Code = "node_refused"
	// codeNodeUnreachable: the node is not connected at present.
	codeNodeUnreachable fault.Code = "node_unreachable"
	// codeTunnelsBusy: too many streams to the node are open.
	codeTunnelsBusy fault.Code = "tunnels_busy"
)
