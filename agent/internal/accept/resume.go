package accept

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/admission"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// Resume verifies the store's documents from the pinned root on and sets those aside that do not verify: trust bundles,
// desired state and its node, digests of workload documents, leases. stored is the pin of the enrollment; given, which
// may be empty, is the operator's pin of now. Call Resume once, before anything else reads the store.
func Resume(store *state.Store, stored, given string, node protocol.NodeIdentity) error {
	docs := store.Stored()
	r := &resumption{node: node, out: state.Resumed{Unverified: map[string]string{}}}
	if err := r.pin(docs.Bundles, stored, given); err != nil {
		return err
	}
	r.bundles(docs.Bundles)
	r.newestBundle(docs)
	r.state(docs)
	r.leases(docs.Leases)
	return store.Resume(r.out)
}

type resumption struct {
	node protocol.NodeIdentity
	pins []string
	out  state.Resumed
}

// pin sets the pins that the first bundle has to satisfy. The given pin may have another form than the stored one, but
// must name the same root.
func (r *resumption) pin(bundles []state.Document, stored, given string) error {
	for _, p := range []string{stored, given} {
		if p != "" {
			r.pins = append(r.pins, p)
		}
	}
	one, errOne := protocol.NormalizePin(stored)
	other, errOther := protocol.NormalizePin(given)
	if stored == "" || given == "" || errOne == nil && errOther == nil && one == other {
		return nil
	}
	for _, doc := range bundles {
		env, err := doc.Envelope()
		if err != nil {
			continue
		}
		_, byStored := protocol.VerifyBundle(env, stored)
		if _, byGiven := protocol.VerifyBundle(env, given); byStored == nil && byGiven == nil {
			return nil
		}
	}
	return fault.New(fault.Conflict, CodeRootFingerprintMismatch,
		"This node was enrolled under the root "+stored+", and --root-fingerprint names "+given+
			". Give the root that it was enrolled under, or leave the flag away.", nil).Permanent()
}

// bundles verifies the chain of trust bundles. If the last one, which is in force, does not verify, none counts: an
// earlier bundle does not name the keys that were revoked since.
func (r *resumption) bundles(docs []state.Document) {
	var chain []protocol.Bundle
	for i, doc := range docs {
		b, err := r.bundle(chain, doc)
		if err == nil {
			chain = append(chain, b)
			continue
		}
		r.out.Unverified[doc.Key] = reason(err)
		if i == len(docs)-1 {
			chain = nil
		}
	}
	r.out.Bundles = chain
}

// newestBundle refuses a chain that ends before the newest bundle that the node has accepted.
func (r *resumption) newestBundle(docs state.Stored) {
	key, version := state.BundleKey, uint64(0)
	if len(r.out.Bundles) > 0 {
		key, version = docs.Bundles[len(docs.Bundles)-1].Key, r.out.Bundles[len(r.out.Bundles)-1].Version()
	}
	if err := docs.Highest.Bundle(version); err != nil && (version > 0 || len(docs.Bundles) == 0) {
		r.out.Bundles, r.out.Unverified[key] = nil, reason(err)
	}
}

func (r *resumption) bundle(chain []protocol.Bundle, doc state.Document) (b protocol.Bundle, err error) {
	env, err := doc.Envelope()
	if err != nil {
		return b, err
	}
	if len(chain) > 0 {
		if b, err = chain[len(chain)-1].Succeed(env); err == nil {
			return b, nil
		}
	}
	if len(r.pins) == 0 {
		return b, protocol.Refuse(protocol.Nack_SIGNATURE_INVALID, "this node has no pinned root")
	}
	for _, p := range r.pins {
		if b, err = protocol.VerifyBundle(env, p); err != nil {
			return protocol.Bundle{}, err
		}
	}
	return b, nil
}

// under verifies with the present bundle, then with earlier ones, newest first, without the keys that are revoked by
// now: a document that was accepted stays accepted when its key is rotated out.
func (r *resumption) under(verify func(protocol.Bundle) error) error {
	if len(r.out.Bundles) == 0 {
		return protocol.Refuse(protocol.Nack_SIGNATURE_INVALID, "there is no trust bundle that verifies")
	}
	present := r.out.Bundles[len(r.out.Bundles)-1]
	err := verify(present)
	for _, b := range slices.Backward(r.out.Bundles[:len(r.out.Bundles)-1]) {
		if err == nil || verify(b.Under(present)) == nil {
			return nil
		}
	}
	return err
}

func (r *resumption) state(docs state.Stored) {
	for _, doc := range docs.State {
		env, err := doc.Envelope()
		if err == nil {
			err = r.under(func(b protocol.Bundle) (err error) {
				r.out.State, err = protocol.VerifyState(env, b, r.node)
				return err
			})
		}
		if err == nil {
			err = newestState(r.out.State.Message(), docs)
		}
		if err != nil {
			r.out.State, r.out.Unverified[doc.Key] = protocol.Verified[*protocol.DesiredState]{}, reason(err)
		}
	}
	if err := agent.NumberOf(nil).CheckOrder(docs.Highest.State); err != nil && len(docs.State) == 0 {
		r.out.Unverified[state.StateKey] = reason(err)
	}
	named := map[string]bool{}
	if r.out.State.OK() {
		for _, ref := range r.out.State.Message().GetParts() {
			named[string(ref.GetSha256())] = true
		}
	}
	for _, doc := range docs.Parts {
		sum := sha256.Sum256(doc.Raw)
		if _, digest, _ := strings.Cut(doc.Key, "/"); digest != hex.EncodeToString(sum[:]) {
			r.out.Unverified[doc.Key] = protocol.Nack_PART_DIGEST_MISMATCH.Text() +
				": the document has another digest than the one it is kept under"
			continue
		}
		if !named[string(sum[:])] {
			continue // of another state
		}
		if _, err := protocol.VerifyPart(r.out.State, doc.Raw); err != nil {
			r.out.Unverified[doc.Key] = reason(err)
			continue
		}
		r.out.Parts = append(r.out.Parts, doc.Raw)
	}
}

// newestState refuses a state after which the node has accepted another one, or may have.
func newestState(d *protocol.DesiredState, docs state.Stored) error {
	if docs.HighestAltered {
		return protocol.Refuse(protocol.Nack_GENERATION_OLDER, "the record of the highest accepted generation is missing "+
			"or altered")
	}
	return agent.NumberOf(d).CheckOrder(docs.Highest.State)
}

func (r *resumption) leases(docs []state.Document) {
	for _, doc := range docs {
		env, err := doc.Envelope()
		var v protocol.Verified[*protocol.LeaseBatch]
		if err == nil {
			err = r.under(func(b protocol.Bundle) (err error) {
				v, err = protocol.VerifyLeases(env, b, r.node)
				return err
			})
		}
		if err != nil {
			r.out.Unverified[doc.Key] = reason(err)
			continue
		}
		r.out.Leases = append(r.out.Leases, v)
	}
}

func reason(err error) string {
	return protocol.RefusalOf(err).Text() + ": " + protocol.RefusalDetail(err)
}

// SignedState verifies the state that the store holds, as Resume does. Without one, the result is not OK.
func SignedState(
	store *state.Store, node protocol.NodeIdentity,
) (v protocol.Verified[*protocol.DesiredState], err error) {
	env, _ := store.Signed()
	if env == nil {
		return v, nil
	}
	r := &resumption{node: node, out: state.Resumed{Bundles: store.Bundles()}}
	err = r.under(func(b protocol.Bundle) (err error) {
		v, err = protocol.VerifyState(env, b, node)
		return err
	})
	return v, err
}

// Check is one result of Verify.
type Check struct {
	// Subject is a document or a member.
	Subject string `json:"subject"`
	What    string `json:"what"`
	OK      bool   `json:"ok"`
	// Detail says what is wrong, as "code: detail"; empty when the check holds.
	Detail string `json:"detail,omitempty"`
}

// Verify checks all that the store holds again: signatures, digests and admissions.
func Verify(store *state.Store, node protocol.NodeIdentity) ([]Check, error) {
	checks := []Check{}
	note := func(subject, what, failure string) {
		checks = append(checks, Check{Subject: subject, What: what, OK: failure == "", Detail: failure})
	}
	noteError := func(subject, what string, err error) {
		failure := ""
		if err != nil {
			failure = reason(err)
		}
		note(subject, what, failure)
	}
	bundles, accepted := store.Bundles(), store.Accepted()
	var err error
	if len(bundles) == 0 {
		err = protocol.Refuse(protocol.Nack_SIGNATURE_INVALID, "there is no trust bundle")
	}
	noteError("trust bundle", "is signed by its root", err)
	r := &resumption{node: node, out: state.Resumed{Bundles: bundles}}
	stateEnv, leases := store.Signed()
	if stateEnv != nil {
		noteError("desired state", "is signed and for this node", r.under(func(b protocol.Bundle) error {
			_, err := protocol.VerifyState(stateEnv, b, node)
			return err
		}))
	}
	for _, env := range leases {
		noteError("leases", "are signed and for this node", r.under(func(b protocol.Bundle) error {
			_, err := protocol.VerifyLeases(env, b, node)
			return err
		}))
	}
	documents, unreadable, err := store.Documents()
	if err != nil {
		return nil, err
	}
	for _, err := range unreadable {
		noteError("a stored document", "can be read", err)
	}
	named := map[[sha256.Size]byte]bool{}
	for _, p := range accepted.Parts {
		named[p.SHA256] = true
	}
	parsed := manifest.Parsed{}
	for _, raw := range documents {
		w := &protocol.Workload{}
		if err := proto.Unmarshal(raw, w); err != nil || !named[sha256.Sum256(raw)] {
			noteError("document of "+w.GetId(), "has the digest that the state names", protocol.Refuse(
				protocol.Nack_PART_DIGEST_MISMATCH, "the stored document was altered"))
			continue
		}
		v := admission.Admit(w, bundles, accepted.IssuedAt, parsed)
		failure := ""
		if !v.Admitted {
			failure = v.Reason.Text() + ": " + v.Detail
		}
		note(w.GetId(), "is admitted by its publisher's manifest", failure)
	}
	for _, p := range accepted.Parts {
		if p.Workload == nil {
			missing := fault.New(fault.NotFound, codeDocumentMissing, "The document has not come yet.", nil)
			note(p.MemberID, "document is here", string(missing.Code)+": "+missing.Public)
		}
	}
	for key, why := range store.Unverified() {
		note("stored "+key, "verified when the agent started", why)
	}
	return checks, nil
}
