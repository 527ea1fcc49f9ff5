package query

import "github.com/gpuaas/gpuaas/pkg/fault"

// Codes of the faults of this package.
const (
	// codeOrgRequired: the caller belongs to no org and must name one.
	codeOrgRequired fault.Code = "org_required"
	// codeEventsExpired: events after the position that the caller names are no longer kept.
	codeEventsExpired fault.Code = "events_expired"
)
