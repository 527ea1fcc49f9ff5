package secret

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeKeyFile: the key file cannot be used.
	codeKeyFile fault.Code = "key_file"
	// codeCredentialExists: the project has an access credential of this name.
	codeCredentialExists fault.Code = "access_credential_exists"
	// codeTokenInvalid: there is no such wrapping token.
	codeTokenInvalid fault.Code = "wrapping_token_invalid"
	// codeTooMany: the project has as many secrets, or access credentials, as it may have.
	codeTooMany fault.Code = "too_many_secrets"
)
