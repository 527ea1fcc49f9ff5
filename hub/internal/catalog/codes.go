package catalog

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// CodeModesContradict: the operating mode and the control plane scope that are asked for contradict each other.
	CodeModesContradict fault.Code = "modes_contradict"
	// CodeNotEntitled: the project has no entitlement to the app.
	CodeNotEntitled fault.Code = "app_not_entitled"
	// CodeSlugTaken: the app slug belongs to another org.
	CodeSlugTaken fault.Code = "app_slug_taken"
	// CodeVersionExists: the version has left draft with other content.
	CodeVersionExists fault.Code = "app_version_exists"
	// CodeVersionNotActive: only active versions can be launched.
	CodeVersionNotActive fault.Code = "app_version_not_active"
	// CodeVersionStatus: the version cannot change to the wanted status.
	CodeVersionStatus fault.Code = "app_version_status"
	// CodePolicyRefused: the project's entitlement does not allow the request.
	CodePolicyRefused fault.Code = "policy_refused"
	// CodePublisherInvalid: the delegation of the publisher does not cover the request.
	CodePublisherInvalid fault.Code = "publisher_invalid"
	// CodePublisherOlder: a newer delegation of the publisher is stored.
	CodePublisherOlder fault.Code = "publisher_older"
)
