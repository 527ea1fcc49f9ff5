package nodes

import (
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Codes of the faults of this package.
const (
	// codeHubBusy: the hub serves too many nodes at present; dial again.
	codeHubBusy fault.Code = "hub_busy"
	// codeIncarnationInvalid: the hello names no incarnation.
	codeIncarnationInvalid fault.Code = "incarnation_invalid"
	// codeIncarnationsTooMany: the node has changed its incarnation too often.
	codeIncarnationsTooMany fault.Code = "incarnations_too_many"
	// codeNodeKeyUnknown: the certificate is not for the key that the node enrolled with.
	codeNodeKeyUnknown fault.Code = "node_key_unknown"
	// codeUsageWaits: the queue of usage segments is full.
	codeUsageWaits fault.Code = "usage_waits"
	// codeNodeQuarantined: the node is quarantined; its reports do not count.
	codeNodeQuarantined fault.Code = "node_quarantined"
)
