package protocol

import (
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/subtle"
	"time"

	"google.golang.org/protobuf/proto"
)

// Verified is a document whose signature and address were checked. Only this package makes one; its zero value is
// refused by everyone who takes one.
type Verified[T proto.Message] struct {
	message  T
	envelope *Envelope
	ok       bool
}

// OK reports whether this came from a Verify function.
func (v Verified[T]) OK() bool { return v.ok }

// Message returns the content. Callers do not change it.
func (v Verified[T]) Message() T { return v.message }

// Envelope returns the signed bytes, for storing and passing on.
func (v Verified[T]) Envelope() *Envelope { return v.envelope }

// Digest returns the SHA-256 of the signed payload: two documents are the same when their digests are.
func (v Verified[T]) Digest() [32]byte { return sha256.Sum256(v.envelope.GetPayload()) }

// NodeIdentity is who a node is: its id and the SHA-256 of its raw Ed25519 public key.
type NodeIdentity struct {
	ID        string
	KeySHA256 [32]byte
}

// NewNodeIdentity derives the identity of a node.
func NewNodeIdentity(id string, pub ed25519.PublicKey) NodeIdentity {
	return NodeIdentity{ID: id, KeySHA256: sha256.Sum256(pub)}
}

// VerifyState checks that a desired state is signed by the state role of the bundle and meant for this node. Order
// (generation, same generation) is checked where the accepted one is stored.
func VerifyState(env *Envelope, b Bundle, me NodeIdentity) (Verified[*DesiredState], error) {
	m := &DesiredState{}
	v, err := verify(env, PayloadState, MaxEnvelopeBytes, b, RoleState, m)
	if err != nil {
		return Verified[*DesiredState]{}, err
	}
	switch {
	case m.GetNodeId() != me.ID || subtle.ConstantTimeCompare(m.GetNodeKeySha256(), me.KeySHA256[:]) != 1:
		return Verified[*DesiredState]{}, Refuse(Nack_WRONG_NODE, "the desired state is for another node or another key "+
			"of it")
	case m.GetMinBundleVersion() > b.Version():
		return Verified[*DesiredState]{},
			Refuse(Nack_BUNDLE_TOO_OLD, "the desired state needs trust bundle %d, this node has %d", m.GetMinBundleVersion(),
				b.Version())
	case m.GetEpoch() != b.Epoch():
		return Verified[*DesiredState]{}, Refuse(Nack_EPOCH_UNKNOWN, "the desired state is of epoch %d, the trust bundle "+
			"of %d",
			m.GetEpoch(), b.Epoch())
	case m.GetGeneration() == 0:
		return Verified[*DesiredState]{}, Refuse(Nack_MALFORMED, "generations start at 1")
	case len(m.GetParts()) > MaxParts:
		return Verified[*DesiredState]{}, Refuse(Nack_TOO_LARGE, "the desired state has over %d parts", MaxParts)
	}
	seen := map[string]bool{}
	for _, p := range m.GetParts() {
		if p.GetId() == "" || len(p.GetSha256()) != sha256.Size || seen[p.GetId()] {
			return Verified[*DesiredState]{}, Refuse(Nack_MALFORMED, "a part has no id, no digest, or stands twice")
		}
		if p.GetSizeBytes() > MaxWorkloadBytes {
			return Verified[*DesiredState]{}, Refuse(Nack_TOO_LARGE, "a part has over %d bytes", MaxWorkloadBytes)
		}
		seen[p.GetId()] = true
	}
	if err := checkVolumes(m.GetVolumes()); err != nil {
		return Verified[*DesiredState]{}, err
	}
	if err := checkSSHKeys(m.GetSshKeys()); err != nil {
		return Verified[*DesiredState]{}, err
	}
	return v, nil
}

// checkSSHKeys checks that each key has an allocation, a project, an account and a size within the limit.
func checkSSHKeys(keys []*SSHKey) error {
	if len(keys) > MaxSSHKeys {
		return Refuse(Nack_TOO_LARGE, "the desired state has over %d SSH keys", MaxSSHKeys)
	}
	for _, k := range keys {
		size := len(k.GetPublicKey())
		if k.GetAllocationId() == "" || k.GetProjectId() == "" || k.GetUser() == "" || size == 0 || size > MaxSSHKeyBytes {
			return Refuse(Nack_MALFORMED, "an SSH key has no allocation, project or account, or no proper size")
		}
	}
	return nil
}

// checkVolumes checks that each volume has its own id, a project and a size, within the limits.
func checkVolumes(volumes []*ProjectVolume) error {
	if len(volumes) > MaxVolumes {
		return Refuse(Nack_TOO_LARGE, "the desired state has over %d volumes", MaxVolumes)
	}
	seen := map[string]bool{}
	for _, p := range volumes {
		if p.GetId() == "" || p.GetProjectId() == "" || p.GetSizeBytes() < MinVolumeBytes || seen[p.GetId()] {
			return Refuse(Nack_MALFORMED, "a volume has no id, no project, too small a size, or stands twice")
		}
		if len(p.GetSnapshots()) > MaxSnapshots {
			return Refuse(Nack_TOO_LARGE, "a volume has over %d snapshots", MaxSnapshots)
		}
		seen[p.GetId()] = true
	}
	return nil
}

// VerifyPart checks a Workload document against the state that names it.
func VerifyPart(state Verified[*DesiredState], part []byte) (*Workload, error) {
	if !state.OK() {
		return nil, Refuse(Nack_SIGNATURE_INVALID, "the desired state was not verified")
	}
	if len(part) > MaxWorkloadBytes {
		return nil, Refuse(Nack_TOO_LARGE, "a part has over %d bytes", MaxWorkloadBytes)
	}
	sum := sha256.Sum256(part)
	for _, ref := range state.Message().GetParts() {
		if subtle.ConstantTimeCompare(ref.GetSha256(), sum[:]) != 1 {
			continue
		}
		w := &Workload{}
		if err := Unmarshal(part, w); err != nil {
			return nil, &RefusalError{Reason: Nack_MALFORMED, Detail: "a part cannot be read", Err: err}
		}
		if w.GetId() != ref.GetId() {
			return nil, Refuse(Nack_MALFORMED, "a part is not the workload that its reference names")
		}
		if w.GetFallback().GetFallback() != nil {
			return nil, Refuse(Nack_MALFORMED, "a fallback has no fallback of its own")
		}
		return w, nil
	}
	return nil, Refuse(Nack_PART_DIGEST_MISMATCH, "a part has a digest that the desired state does not name")
}

// VerifyLeases checks that a batch of leases is signed by the lease role and meant for this node.
func VerifyLeases(env *Envelope, b Bundle, me NodeIdentity) (Verified[*LeaseBatch], error) {
	m := &LeaseBatch{}
	v, err := verify(env, PayloadLeases, MaxEnvelopeBytes, b, RoleLease, m)
	if err != nil {
		return Verified[*LeaseBatch]{}, err
	}
	switch {
	case m.GetNodeId() != me.ID:
		return Verified[*LeaseBatch]{}, Refuse(Nack_WRONG_NODE, "the leases are for another node")
	case m.GetEpoch() != b.Epoch():
		return Verified[*LeaseBatch]{}, Refuse(Nack_EPOCH_UNKNOWN, "the leases are of epoch %d, the trust bundle of %d",
			m.GetEpoch(), b.Epoch())
	case len(m.GetLeases()) > MaxLeases:
		return Verified[*LeaseBatch]{}, Refuse(Nack_TOO_LARGE, "the batch has over %d leases", MaxLeases)
	}
	return v, nil
}

// VerifySegment checks that a usage segment is signed by the node's own key. Whose segment it is and its place in the
// chain are checked where the chain is stored.
func VerifySegment(env *Envelope, node ed25519.PublicKey) (Verified[*UsageSegment], error) {
	v, err := verifyOfNode(env, PayloadSegment, MaxSegmentBytes, node, &UsageSegment{})
	if err == nil && len(v.message.GetRecords()) > MaxSegmentRecords {
		return Verified[*UsageSegment]{}, Refuse(Nack_TOO_LARGE, "the usage segment has over %d records", MaxSegmentRecords)
	}
	return v, err
}

// VerifyOwnerRefusal checks that the refusal of a node's owner is signed by the node's own key and about this very
// status.
func VerifyOwnerRefusal(s *WorkloadStatus, nodeID string, node ed25519.PublicKey) (Verified[*OwnerRefusal], error) {
	v, err := verifyOfNode(s.GetOwnerRefusal(), PayloadRefusal, MaxRefusalBytes, node, &OwnerRefusal{})
	if err != nil {
		return v, err
	}
	m := v.message
	if m.GetNodeId() != nodeID || m.GetMemberId() != s.GetMemberId() || m.GetInstanceId() != s.GetInstanceId() ||
		m.GetRevision() != s.refusedRevision() {
		return Verified[*OwnerRefusal]{}, Refuse(Nack_MALFORMED, "the owner's refusal is about something else")
	}
	return v, nil
}

// refusedRevision is the revision that the reason of a status is about.
func (s *WorkloadStatus) refusedRevision() uint64 {
	if from := s.GetFallbackFromRevision(); from != 0 && s.GetStatus() != WorkloadStatus_FAILED {
		return from
	}
	return s.GetRevision()
}

// RefuseAsOwner adds the signed refusal of the node's owner to a status. Its rule is the status's detail.
func (s *WorkloadStatus) RefuseAsOwner(nodeID string, signer Signer) error {
	env, err := SignMessage(PayloadRefusal, &OwnerRefusal{
		NodeId: nodeID, MemberId: s.GetMemberId(), InstanceId: s.GetInstanceId(), Revision: s.refusedRevision(),
		Rule: s.GetDetail(),
	}, signer)
	s.OwnerRefusal = env
	return err
}

// verifyOfNode reads what a node signed with its own key.
func verifyOfNode[M proto.Message](env *Envelope, payloadType string, maxBytes int, node ed25519.PublicKey,
	m M,
) (Verified[M], error) {
	if err := checkShape(env, payloadType, maxBytes); err != nil {
		return Verified[M]{}, err
	}
	key := &PublicKey{KeyId: KeyID(node), Ed25519: node}
	if ids, _ := signedBy(env, []*PublicKey{key}, nil); len(ids) != 1 {
		return Verified[M]{}, Refuse(Nack_SIGNATURE_INVALID, "the document is not signed by the node's key")
	}
	if err := Unmarshal(env.GetPayload(), m); err != nil {
		return Verified[M]{}, &RefusalError{Reason: Nack_MALFORMED, Detail: "the document cannot be read", Err: err}
	}
	return Verified[M]{message: m, envelope: env, ok: true}, nil
}

// VerifyDelegation checks that the catalog role let the publisher sign.
func VerifyDelegation(env *Envelope, b Bundle, now time.Time) (Verified[*Delegation], error) {
	m := &Delegation{}
	v, err := verify(env, PayloadDelegation, MaxManifestBytes, b, RoleCatalog, m)
	if err != nil {
		return Verified[*Delegation]{}, err
	}
	k := m.GetPublisher()
	switch {
	case len(k.GetEd25519()) != ed25519.PublicKeySize || KeyID(k.GetEd25519()) != k.GetKeyId():
		return Verified[*Delegation]{}, Refuse(Nack_MALFORMED, "the delegation's publisher key is not its id")
	case len(m.GetRepositoryPrefixes()) == 0:
		return Verified[*Delegation]{}, Refuse(Nack_MALFORMED, "the delegation names no repository prefix")
	case b.Revoked(k.GetKeyId()):
		return Verified[*Delegation]{}, Refuse(Nack_KEY_REVOKED, "the publisher's key was revoked")
	case m.GetExpiresAt() != nil && now.After(m.GetExpiresAt().AsTime()):
		return Verified[*Delegation]{}, Refuse(Nack_EXPIRED, "the publisher's delegation has expired")
	}
	for _, p := range m.GetRepositoryPrefixes() {
		if len(p) < 2 || p[len(p)-1] != '/' || p[0] == '/' {
			return Verified[*Delegation]{}, Refuse(Nack_MALFORMED, "a repository prefix does not end in a slash or starts "+
				"with one")
		}
	}
	return v, nil
}

// Publisher is who signed a manifest and for which repositories.
type Publisher struct {
	KeyID string
	// OrgSlug is empty for platform apps.
	OrgSlug            string
	RepositoryPrefixes []string
}

// VerifyPublisher checks a manifest's envelope. With a delegation the publisher that it names must have signed; without
// one, the catalog role itself, which may speak for every repository.
func VerifyPublisher(env, delegation *Envelope, b Bundle, now time.Time) ([]byte, Publisher, error) {
	if err := checkShape(env, PayloadManifest, MaxManifestBytes); err != nil {
		return nil, Publisher{}, err
	}
	if delegation == nil {
		ids, err := b.signers(env, RoleCatalog)
		if err != nil {
			return nil, Publisher{}, err
		}
		return env.GetPayload(), Publisher{KeyID: ids[0], RepositoryPrefixes: []string{"apps/", "org/"}}, nil
	}
	d, err := VerifyDelegation(delegation, b, now)
	if err != nil {
		return nil, Publisher{}, err
	}
	m := d.Message()
	if ids, _ := signedBy(env, []*PublicKey{m.GetPublisher()}, b.revoked); len(ids) != 1 {
		return nil, Publisher{}, Refuse(Nack_SIGNATURE_INVALID, "the manifest is not signed by the publisher that the "+
			"delegation "+
			"names")
	}
	return env.GetPayload(), Publisher{
		KeyID: m.GetPublisher().GetKeyId(), OrgSlug: m.GetOrgSlug(),
		RepositoryPrefixes: m.GetRepositoryPrefixes(),
	}, nil
}

func verify[T proto.Message](env *Envelope, payloadType string, maxBytes int, b Bundle, role string,
	m T,
) (Verified[T], error) {
	if err := checkShape(env, payloadType, maxBytes); err != nil {
		return Verified[T]{}, err
	}
	if !b.Valid() {
		return Verified[T]{}, Refuse(Nack_SIGNATURE_INVALID, "there is no trust bundle")
	}
	// The signature comes before the first byte is decoded: a decoder never sees what a stranger wrote.
	if err := b.signed(env, role); err != nil {
		return Verified[T]{}, err
	}
	if err := Unmarshal(env.GetPayload(), m); err != nil {
		return Verified[T]{}, &RefusalError{Reason: Nack_MALFORMED, Detail: "the document cannot be read", Err: err}
	}
	return Verified[T]{message: m, envelope: env, ok: true}, nil
}
