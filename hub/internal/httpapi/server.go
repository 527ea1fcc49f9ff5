// Package httpapi is the hub's REST face: it checks requests against the contract, finds out who calls, hands over to
// the commands and slices, and turns a fault into a problem document in one place. It decides nothing about resources.
package httpapi

import "context"

// Server answers the operations of the contract. Its methods are in handlers_<slice>.go, one file a slice; each slice
// adds the commands it needs to its own section here. The program that wires the hub fills the fields.
type Server struct {
	// Version is the hub's own, for healthz.
	Version string
	// Ready says why the hub cannot serve, or nil; a nil func is always ready.
	Ready     func(ctx context.Context) error
	readiness readiness

	// ---- iam

	IAM IAM

	// ---- catalog, artifact

	Catalog   Catalog
	Artifacts Artifacts

	// ---- event

	Audit Audit

	// ---- capacity, instance

	Capacity  Capacity
	Instances Instances

	// ---- fleet, trust

	Fleet Fleet

	// ---- ledger

	Billing Billing
}

var _ StrictServerInterface = (*Server)(nil)
