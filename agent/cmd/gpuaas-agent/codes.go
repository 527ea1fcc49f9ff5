package main

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeJoinTokenUnreadable: the file with the join token cannot be read.
	codeJoinTokenUnreadable fault.Code = "join_token_unreadable"
	// codeUninstallIncomplete: uninstall could not remove everything and can be run again.
	codeUninstallIncomplete fault.Code = "uninstall_incomplete"
	// codeVerifyFailed: stored documents do not verify.
	codeVerifyFailed fault.Code = "verify_failed"
)
