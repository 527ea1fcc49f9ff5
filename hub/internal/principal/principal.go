// Package principal names who acts: in a request, in the rows that it makes, in events and in the audit trail. What an
// actor may do is decided by package iam.
package principal

// Type is a kind of actor.
type Type string

// The types of actors.
const (
	User           Type = "user"
	ServiceAccount Type = "service_account"
	Node           Type = "node"
	// System is the hub itself, or an operator who runs its commands on its machine.
	System Type = "system"
	// Recovery is the hub that makes rows from a node's state upload after a restore.
	Recovery Type = "recovery"
	// Anonymous is a caller without a valid credential.
	Anonymous Type = "anonymous"
)

// Actor is who did, or asked for, something. ID is empty for the types that are not one of many.
type Actor struct {
	Type Type   `json:"type"`
	ID   string `json:"id,omitempty"`
}
