package httpapi

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeBodyIncomplete: the body did not arrive completely.
	codeBodyIncomplete fault.Code = "body_incomplete"
	// codeBodyMissing: the operation needs a JSON body.
	codeBodyMissing fault.Code = "body_missing"
	// codeBodyNotJSON: the body is not strict JSON.
	codeBodyNotJSON fault.Code = "body_not_json"
	// codeBodyTooLarge: the body exceeds the limit of the operation.
	codeBodyTooLarge fault.Code = "body_too_large"
	// codeContentTypeUnsupported: the body is not declared as JSON.
	codeContentTypeUnsupported fault.Code = "content_type_unsupported"
	// codeCredentialMissing: the operation needs a bearer token.
	codeCredentialMissing fault.Code = "credential_missing"
	// codeEnvelopeMalformed: the signed envelope cannot be read.
	codeEnvelopeMalformed fault.Code = "envelope_malformed"
	// codeInvalidRequest: the request does not follow the contract; errors[] names the places.
	codeInvalidRequest fault.Code = "invalid_request"
	// codeMemberRemoved: the member was removed from its node.
	codeMemberRemoved fault.Code = "member_removed"
	// codeMemberUnknown: the app instance has no such member.
	codeMemberUnknown fault.Code = "member_unknown"
	// codeMethodNotAllowed: the path does not take the method; no kind of fault is a 405.
	codeMethodNotAllowed fault.Code = "method_not_allowed"
	// codeNotReady: the hub cannot serve at present.
	codeNotReady fault.Code = "not_ready"
	// codePeriodEmpty: the period ends before it begins.
	codePeriodEmpty fault.Code = "period_empty"
	// codePortUnknown: the member publishes no such port at present.
	codePortUnknown fault.Code = "port_unknown"
	// codeRouteNotFound: the API has no such path.
	codeRouteNotFound fault.Code = "route_not_found"
	// codeSignatureEncoding: the signature is not standard base64.
	codeSignatureEncoding fault.Code = "signature_encoding"
	// codeTooManyAtOnce: a budget of concurrent requests is used up.
	codeTooManyAtOnce fault.Code = "too_many_at_once"
	// codeUpgradeMissing: the request does not ask for the upgrade that the operation needs.
	codeUpgradeMissing fault.Code = "upgrade_missing"
)
