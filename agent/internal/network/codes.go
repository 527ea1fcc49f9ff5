package network

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeBadNetwork: a network or port of the workload is not valid.
	codeBadNetwork fault.Code = "bad_network"
	// codeFirewallFailed: the agent cannot read or change the firewall.
	codeFirewallFailed fault.Code = "firewall_failed"
	// codeNetworkFailed: the agent cannot make a bridge or network.
	codeNetworkFailed fault.Code = "network_failed"
	// codeNetworkFull: the node's member network has no free address.
	codeNetworkFull fault.Code = "network_full"
	// codeNetworkOverlaps: the member network or its bridge collides with a network of the machine.
	codeNetworkOverlaps fault.Code = "network_overlaps"
	// codeSysctlRefused: the agent cannot set a kernel parameter.
	codeSysctlRefused fault.Code = "sysctl_refused"
)
