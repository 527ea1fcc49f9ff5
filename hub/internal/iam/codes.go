package iam

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeAlreadyExists: a resource of this name exists already.
	codeAlreadyExists fault.Code = "already_exists"
	// codeCredentialsInvalid: the service account, its key or the assertion is not valid.
	codeCredentialsInvalid fault.Code = "credentials_invalid"
	// codeExternalLoginEnded: the login at the identity provider was finished, or took too long.
	codeExternalLoginEnded fault.Code = "external_login_ended"
	// codeForbidden: the caller lacks the permission.
	codeForbidden fault.Code = "forbidden"
	// codeIdentityUnknown: the person is no user, and no invitation or rule makes it one.
	codeIdentityUnknown fault.Code = "identity_unknown"
	// codeInvitationInvalid: the invitation was accepted or revoked, or its time is over.
	codeInvitationInvalid fault.Code = "invitation_invalid"
	// codeLastPlatformAdmin: the last platform admin cannot be removed.
	codeLastPlatformAdmin fault.Code = "last_platform_admin"
	// codeLimitReached: the org or project holds as many as it may.
	codeLimitReached fault.Code = "limit_reached"
	// codeLoginRefused: the e-mail address, the password or the one-time code is not right.
	codeLoginRefused fault.Code = "login_refused"
	// codeNoPlatformAdmin: no platform admin exists yet.
	codeNoPlatformAdmin fault.Code = "no_platform_admin"
	// codePrivateKeyUnreadable: the private key cannot be read.
	codePrivateKeyUnreadable fault.Code = "private_key_unreadable"
	// codeRoleInUse: users hold the role.
	codeRoleInUse fault.Code = "role_in_use"
	// codeServiceAccountDisabled: the service account is disabled.
	codeServiceAccountDisabled fault.Code = "service_account_disabled"
	// codePasswordRefused: the current password or the one-time code is not right.
	codePasswordRefused fault.Code = "password_refused"
	// codeSessionEnded: the refresh token does not count.
	codeSessionEnded fault.Code = "session_ended"
	// codeTokenKeySealed: the key of access tokens, or of one-time codes, cannot be opened with the hub's key file.
	codeTokenKeySealed fault.Code = "token_key_sealed"
	// codeUnauthenticated: the request carries no valid token.
	codeUnauthenticated fault.Code = "unauthenticated"
)
