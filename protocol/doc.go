// Package protocol is what the hub and a node share: the messages, how documents are signed and verified, the trust
// bundle, the identities, the limits and the history of the protocol. It does no I/O, reads no clock and holds no
// state; package link carries its messages.
//
// Trust is a type: only the Verify functions make a Verified, and nothing acts on a document that is not one.
package protocol
