package capacity

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeAllocationInUse: app instances run in the allocation.
	codeAllocationInUse fault.Code = "allocation_in_use"
	// codeAllocationNodeLost: the node of the allocation is gone for good.
	codeAllocationNodeLost fault.Code = "allocation_node_lost"
	// codeAllocationReleased: the allocation was released.
	codeAllocationReleased fault.Code = "allocation_released"
	// codeAllocationReleasing: the allocation is being released.
	codeAllocationReleasing fault.Code = "allocation_releasing"
	// codeAllocationUnknown: an allocation named for placement is not in this project.
	codeAllocationUnknown fault.Code = "allocation_unknown"
	// CodeInsufficient: no node or allocation has room for the request.
	CodeInsufficient fault.Code = "insufficient_capacity"
	// codeFeatureMissing: the agents of the nodes in question are older than the manifest.
	codeFeatureMissing fault.Code = "feature_missing"
	// codeNodeUnknown: the node named for an allocation does not exist.
	codeNodeUnknown fault.Code = "node_unknown"
	// codePlacementRequired: the request must name the allocation that the instance runs in.
	codePlacementRequired fault.Code = "placement_required"
	// codePlacementUnsupported: the placement names more than one allocation.
	codePlacementUnsupported fault.Code = "placement_unsupported"
	// codePortUnavailable: a port of the node that was chosen is in use, or the owner lets nobody choose it.
	codePortUnavailable fault.Code = "port_unavailable"
	// codeSKUExists: there is another SKU of this name.
	codeSKUExists fault.Code = "sku_exists"
	// codeSKUInvalid: the size of the SKU contradicts itself.
	codeSKUInvalid fault.Code = "sku_invalid"
	// codeSKUMismatch: the requested shape is not the one of the SKU.
	codeSKUMismatch fault.Code = "sku_mismatch"
	// codeSKURetired: the SKU is not sold any more.
	codeSKURetired fault.Code = "sku_retired"
	// codeSSHAccountTaken: another project has SSH keys of the account on this node.
	codeSSHAccountTaken fault.Code = "ssh_account_taken"
	// codeSSHKeyInvalid: an SSH key cannot be read, is too weak or has options.
	codeSSHKeyInvalid fault.Code = "ssh_key_invalid"
	// codeSnapshotsTooMany: the volume has as many snapshots as a volume may have.
	codeSnapshotsTooMany fault.Code = "volume_snapshots_too_many"
	// CodeVolumeElsewhere: the volume is kept by another node.
	CodeVolumeElsewhere fault.Code = "volume_on_another_node"
	// codeVolumeExists: the project has a volume of this name.
	codeVolumeExists fault.Code = "volume_exists"
	// codeVolumeInUse: app instances have the volume.
	codeVolumeInUse fault.Code = "volume_in_use"
	// codeVolumeStatus: the status of the volume or the snapshot does not allow it.
	codeVolumeStatus fault.Code = "volume_status"
	// codeSKUUnknown: the SKU does not exist.
	codeSKUUnknown fault.Code = "sku_unknown"
)
