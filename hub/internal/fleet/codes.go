package fleet

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeExpiryOutOfRange: the lifetime of a join token is out of range.
	codeExpiryOutOfRange fault.Code = "expiry_out_of_range"
	// codeJoinTokenInvalid: the join token is unknown, expired or used by another node.
	codeJoinTokenInvalid fault.Code = "join_token_invalid"
	// CodeBanned: the node is banned.
	CodeBanned fault.Code = "node_banned"
	// codeNodeConnected: the node is connected, so it cannot be declared lost.
	codeNodeConnected fault.Code = "node_connected"
	// codeNodeKeyInUse: a node with this key is enrolled already.
	codeNodeKeyInUse fault.Code = "node_key_in_use"
	// codeNodeNotDraining: the node must be drained first.
	codeNodeNotDraining fault.Code = "node_not_draining"
	// CodeNodeNotFound: the node does not exist.
	CodeNodeNotFound fault.Code = "node_not_found"
	// CodeNodeRemoved: the node was removed from the mesh.
	CodeNodeRemoved fault.Code = "node_removed"
	// codeProofInvalid: the request is not signed by the key that the node enrolled with.
	codeProofInvalid fault.Code = "proof_invalid"
)
