package local

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeAgentAnswer: the answer of the agent on its socket cannot be read.
	codeAgentAnswer fault.Code = "agent_answer"
	// codeAgentAway: no agent answers on the socket.
	codeAgentAway fault.Code = "agent_away"
	// codePolicyMissing: the file of the owner's policy does not exist.
	codePolicyMissing fault.Code = "policy_missing"
	// codeSocketUnusable: the agent cannot make its socket.
	codeSocketUnusable fault.Code = "socket_unusable"
	// codeUnreadable: the document in the request cannot be read.
	codeUnreadable fault.Code = "unreadable"
)
