// Package fleet owns the nodes: sites, join tokens, enrollment, facts, drain, ban, quarantine and removal, the current
// session, acknowledged and refused documents, and the revision of each node's intent. It does not own the instances on
// a node (instance), its capacity (capacity), or the keys that sign certificates (trust).
package fleet

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"math"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// OnlineWindow is how long a node counts as online after its last message: three reports.
	OnlineWindow = 90 * time.Second
	// ReconnectGrace is how long a node may take to reconnect before it counts as offline: an agent's restart is no
	// outage.
	ReconnectGrace = 30 * time.Second
	// DefaultTokenTTL is how long a join token is valid by default.
	DefaultTokenTTL = 24 * time.Hour
	// MinTokenTTL is the shortest validity of a join token.
	MinTokenTTL = time.Minute
	// MaxTokenTTL is the longest.
	MaxTokenTTL = 30 * 24 * time.Hour
	// MaxRefusals is how many refusals of one node are kept; older ones are deleted.
	MaxRefusals = 20
	// maxTextBytes bounds a text from a node, maxFactBytes a text of its facts; longer ones are truncated.
	maxTextBytes = 512
	maxFactBytes = 128
	// maxQuantity bounds the cores and bytes that a node may report.
	maxQuantity = 1 << 50
	// maxSuspects bounds the suspect incarnations of a quarantined node; the oldest are dropped.
	maxSuspects = 16
	// maxGeneration keeps numbers from a node far from the limit of the column.
	maxGeneration = 1 << 62
)

// DefaultSite is the slug of the site that nodes join by default.
const DefaultSite = "default"

// Status is what a node may be used for.
type Status string

// The statuses of a node.
const (
	Online   Status = "online"
	Offline  Status = "offline"
	Draining Status = "draining"
	Banned   Status = "banned"
	// A removed node has left the mesh empty; a lost one was declared gone for good with the workloads that it ran.
	Removed Status = "removed"
	Lost    Status = "lost"
	// A quarantined node gets no new documents and its reports do not count, until an admin releases it.
	Quarantined Status = "quarantined"
)

// ReasonIdentityUsedTwice means that two processes use the node's key: its disk was copied, or its key stolen.
const ReasonIdentityUsedTwice = "identity_used_twice"

// Node is one machine of the mesh.
type Node struct {
	ID              string
	SiteID          string
	Hostname        string
	PublicKey       ed25519.PublicKey
	ResourceVersion int64
	Draining        bool
	BannedAt        time.Time
	BanReason       string
	// RemovedAt is when the node was removed for good; Lost says that it was out of contact then.
	RemovedAt    time.Time
	Lost         bool
	RemoveReason string
	// QuarantinedAt is zero where the node is not quarantined.
	QuarantinedAt    time.Time
	QuarantineReason string
	// SuspectIncarnations said hello in quarantine: a store with one of them must take a new incarnation.
	SuspectIncarnations  []string
	CertificateExpiresAt time.Time
	// Incarnation is the one of the node's last hello.
	Incarnation        string
	AcceptedEpoch      uint64
	AcceptedGeneration uint64
	BundleVersion      uint64
	AgentVersion       string
	ProtocolVersion    uint32
	Features           []string
	// CPUCores and MemoryBytes are the facts that placement needs.
	CPUCores    int64
	MemoryBytes int64
	// Facts are nil until LoadFacts.
	Facts      *protocol.NodeFacts
	Conditions []string
	CreatedAt  time.Time
	UpdatedAt  time.Time
	// Resync is what a restored hub still needs from the node.
	Resync Resync
	// SessionNo is of the newest connection; 0 before the first.
	SessionNo uint64
	// LastSeenAt is zero before the first connection.
	LastSeenAt     time.Time
	DisconnectedAt time.Time
	// factsSHA256 detects changed facts.
	factsSHA256 []byte
	// Reachable is whether the node's members count as reachable. It follows the contact with a delay (SetUnreachable).
	Reachable bool
}

// Identity is the addressee of documents for this node.
func (n Node) Identity() protocol.NodeIdentity { return protocol.NewNodeIdentity(n.ID, n.PublicKey) }

// IsBanned reports whether the node is shut out for good.
func (n Node) IsBanned() bool { return !n.BannedAt.IsZero() }

// IsRemoved reports whether the node was removed for good, lost or not.
func (n Node) IsRemoved() bool { return !n.RemovedAt.IsZero() }

// TakesNew reports whether new workloads may be placed on the node once it is connected. While a node awaits resync,
// the hub does not know its free capacity.
func (n Node) TakesNew() bool {
	return !n.Draining && !n.IsBanned() && !n.IsRemoved() && n.Syncable()
}

// TakesAnother reports whether the node, which runs so many members, takes one more: a state has protocol.MaxParts.
func (n Node) TakesAnother(members int) bool { return n.TakesNew() && members < protocol.MaxParts }

// SingleOrgConditions returns the conditions for which the node serves one org at a time; empty where several orgs may
// share it.
func (n Node) SingleOrgConditions() []string {
	if slices.Contains(n.Conditions, protocol.ConditionWeakIsolationShared) {
		return nil
	}
	return slices.DeleteFunc(protocol.WeakIsolation(), func(c string) bool { return !slices.Contains(n.Conditions, c) })
}

// admissionError is why the node may not connect; nil if it may. A lost node may: it uploads the usage that it owes and
// gets an empty state.
func (n Node) admissionError() error {
	switch {
	case n.IsBanned():
		return bannedFault()
	case n.IsRemoved() && !n.Lost:
		return fault.New(fault.Forbidden, CodeNodeRemoved, "This node was removed from the mesh. It may return as a new "+
			"node, with a new key and a new join token.", nil).Permanent()
	}
	return nil
}

// IsQuarantined reports whether the node is in quarantine.
func (n Node) IsQuarantined() bool { return !n.QuarantinedAt.IsZero() }

// Connected reports whether the node sent a message within OnlineWindow on a connection that is still open.
func (n Node) Connected(now time.Time) bool {
	return n.SessionNo > 0 && n.DisconnectedAt.IsZero() && now.Sub(n.LastSeenAt) < OnlineWindow
}

// Status returns the node's status; where several apply, the most severe.
func (n Node) Status(now time.Time) Status {
	switch {
	case n.IsBanned():
		return Banned
	case n.Lost:
		return Lost
	case n.IsRemoved():
		return Removed
	case n.IsQuarantined():
		return Quarantined
	case n.Draining:
		return Draining
	case n.Connected(now):
		return Online
	default:
		return Offline
	}
}

// JoinToken enrolls one node, once.
type JoinToken struct {
	ID          string
	SiteID      string
	Description string
	CreatedBy   string
	CreatedAt   time.Time
	ExpiresAt   time.Time
	UsedAt      time.Time
	// NodeID is the node that it enrolled; empty while unused.
	NodeID string
}

// Status of the token: open, used or expired.
func (t JoinToken) Status(now time.Time) string {
	switch {
	case !t.UsedAt.IsZero():
		return "used"
	case now.Before(t.ExpiresAt):
		return "open"
	default:
		return "expired"
	}
}

// joinTokenPrefix lets secret scanners and people recognise a token.
const joinTokenPrefix = "gpuaas-join-" //nolint:gosec // G101: the public part of a token

// NewJoinSecret makes the secret of a join token: 256 random bits, so that its plain digest can be stored.
func NewJoinSecret() (string, error) {
	raw := make([]byte, 32)
	if _, err := rand.Read(raw); err != nil {
		return "", err
	}
	return joinTokenPrefix + base64.RawURLEncoding.EncodeToString(raw), nil
}

func secretDigest(secret string) []byte {
	sum := sha256.Sum256([]byte(secret))
	return sum[:]
}

// Refusal is a document that a node refused.
type Refusal struct {
	Document   string
	Epoch      uint64
	Generation uint64
	// Reason is one of protocol's Refusal… constants.
	Reason string
	Detail string
	At     time.Time
}

// RenewalMessage is what a node signs to prove that it has its key; otherwise a recorded certificate request could be
// signed again. The time is not compared with the hub's clock: a node whose clock says 1970 must be able to renew, and
// a replayed request yields a certificate for the node's own key only.
func RenewalMessage(nodeID, csrPEM, issuedAt string) []byte {
	return []byte(nodeID + "\n" + csrPEM + "\n" + issuedAt)
}

// MayRenew decides whether a node gets a new certificate: only with proof of the key that it enrolled with, and never
// when banned or removed. Without the proof a caller does not learn which.
func MayRenew(n Node, csrKey ed25519.PublicKey, message, signature []byte) error {
	if !bytes.Equal(n.PublicKey, csrKey) || !ed25519.Verify(n.PublicKey, message, signature) {
		return ErrProof()
	}
	return n.admissionError()
}

// minRenewalPause is the time between two certificates of a node: each is a row, an event and an audit row. Of
// certificates that live for less than 8 minutes it is an eighth of their life; nodes renew at half of it.
const minRenewalPause = time.Minute

// CheckRenewalPace refuses a certificate to a node that got one of the same lifetime a moment ago. It goes by the end
// of the last one, so that after a change of the lifetime, or of the hub's clock, a node may renew at once.
func (n Node) CheckRenewalPace(lifetime time.Duration, now time.Time) error {
	pause := min(minRenewalPause, lifetime/8)
	since := now.Sub(n.CertificateExpiresAt.Add(-lifetime))
	if since < 0 || since >= pause {
		return nil
	}
	return fault.New(fault.RateLimited, fault.CodeRateLimited, "The node got a certificate a moment ago. Wait as long as "+
		"Retry-After says.", nil).RetryAfter(pause - since)
}

// ErrProof answers a renewal without the proof of the node's key, also for a node that does not exist.
func ErrProof() *fault.Error {
	return fault.New(fault.Unauthenticated, codeProofInvalid, "The request is not signed by the key that the node "+
		"enrolled with.", nil).WithField("/signature", "does not verify")
}

func bannedFault() error {
	return fault.New(fault.Forbidden, CodeBanned, "This node is banned. It may return as a new node, with a new key and "+
		"a new join token.", nil).Permanent()
}

func notFound() error {
	return fault.New(fault.NotFound, CodeNodeNotFound, "There is no such node.", nil)
}

// tokenFault is the same for every unusable token, so that guessing tokens reveals nothing.
func tokenFault() error {
	return fault.New(fault.Unauthenticated, codeJoinTokenInvalid, "The join token is unknown, expired, or was used by "+
		"another node. Make a new one.", nil).WithField("/join_token", "cannot be used").Permanent()
}

// truncate bounds a text from a node, and drops what the database cannot store as text.
func truncate(s string) string { return truncateTo(s, maxTextBytes) }

func truncateTo(s string, maxBytes int) string {
	return strings.ToValidUTF8(strings.ReplaceAll(s[:min(len(s), maxBytes)], "\x00", ""), "")
}

func bounded(list []string) []string {
	out := make([]string, 0, min(len(list), protocol.MaxConditions))
	for _, s := range list[:min(len(list), protocol.MaxConditions)] {
		out = append(out, truncate(s))
	}
	return out
}

// boundedFacts copies the known fields of the facts, each within its bound. The accelerators are capacity's.
func boundedFacts(f *protocol.NodeFacts) *protocol.NodeFacts {
	fact := func(s string) string { return truncateTo(s, maxFactBytes) }
	out := &protocol.NodeFacts{
		Hostname: fact(f.GetHostname()), Os: fact(f.GetOs()), Kernel: fact(f.GetKernel()),
		Architecture:      fact(f.GetArchitecture()),
		ContainerdVersion: fact(f.GetContainerdVersion()), RuncVersion: fact(f.GetRuncVersion()),
		CpuCores: f.GetCpuCores(), MemoryBytes: min(f.GetMemoryBytes(), maxQuantity), Conditions: bounded(f.GetConditions()),
		VolumeBytes: min(f.GetVolumeBytes(), maxQuantity),
	}
	if f.GetBootTime().IsValid() { // or it could not be encoded
		out.BootTime = timestamppb.New(f.GetBootTime().AsTime())
	}
	if p := f.GetHostPorts(); p.GetFirst() > 0 && p.GetFirst() <= p.GetLast() && p.GetLast() <= math.MaxUint16 {
		out.HostPorts = &protocol.PortRange{First: p.GetFirst(), Last: p.GetLast()}
	}
	if k := f.GetSealingKey(); len(k.GetPayload()) <= protocol.MaxSealingKeyBytes && len(k.GetSignatures()) == 1 {
		out.SealingKey = k // Seal verifies it
	}
	return out
}
