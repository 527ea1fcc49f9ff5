package uplink_test

import (
	"bytes"
	"crypto/sha256"
	"io"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/uplink"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

func TestLaw01OnlyWhatIsSignedForThisNodeIsAccepted(t *testing.T) {
	h, n, s := start(t)
	env, parts := h.desired(h.state, func(d *protocol.DesiredState) { d.Generation = 5 }, &protocol.Workload{Id: "m1"})
	s.pushState(env, parts...)
	require.EqualValues(t, 5, s.accepted().GetGeneration())

	next := func(change func(*protocol.DesiredState)) *protocol.Envelope {
		env, _ := h.desired(h.state, func(d *protocol.DesiredState) {
			d.Generation = 6
			if change != nil {
				change(d)
			}
		})
		return env
	}
	forged, _ := h.desired(newKey(t), func(d *protocol.DesiredState) { d.Generation = 6 })
	tampered := next(nil)
	tampered.Payload = append([]byte{}, tampered.GetPayload()...)
	tampered.Payload[len(tampered.GetPayload())-1] ^= 1
	huge := next(nil)
	huge.Payload = make([]byte, protocol.MaxEnvelopeBytes+1)
	stranger := sha256.Sum256([]byte("another key"))
	for _, c := range []struct {
		name   string
		reason protocol.Nack_Reason
		env    *protocol.Envelope
	}{
		{"forged", protocol.Nack_SIGNATURE_INVALID, forged},
		{"tampered", protocol.Nack_SIGNATURE_INVALID, tampered},
		{"signed by the wrong role", protocol.Nack_SIGNATURE_INVALID, func() *protocol.Envelope {
			e, _ := h.desired(h.lease, nil)
			return e
		}()},
		{"for another node", protocol.Nack_WRONG_NODE, next(func(d *protocol.DesiredState) { d.NodeId = "other" })},
		{"for an earlier key of this node", protocol.Nack_WRONG_NODE, next(func(d *protocol.DesiredState) {
			d.NodeKeySha256 = stranger[:]
		})},
		{"older", protocol.Nack_GENERATION_OLDER, next(func(d *protocol.DesiredState) { d.Generation = 4 })},
		{"same generation, other content", protocol.Nack_GENERATION_CONFLICT, next(func(d *protocol.DesiredState) {
			d.Generation = 5
		})},
		{"of an unknown epoch", protocol.Nack_EPOCH_UNKNOWN, next(func(d *protocol.DesiredState) { d.Epoch = 9 })},
		{"oversized", protocol.Nack_TOO_LARGE, huge},
		{"needs a newer trust bundle", protocol.Nack_BUNDLE_TOO_OLD, next(func(d *protocol.DesiredState) {
			d.MinBundleVersion = 7
		})},
		{"empty", protocol.Nack_MALFORMED, nil},
	} {
		h.setFetches(func(*protocol.FetchRequest) *protocol.FetchResponse {
			return &protocol.FetchResponse{ErrorReason: protocol.Nack_UNAVAILABLE}
		})
		s.pushState(c.env)
		require.Equal(t, c.reason, s.refused().GetReason(), c.name)
		require.EqualValues(t, 5, n.store.Accepted().Generation, c.name)
	}
	require.Contains(t, n.up.Status().LastRefusal, protocol.Nack_MALFORMED.Text())

	// A revoked key signs in vain, and the next bundle comes first.
	h.version, h.revoked = 2, []string{protocol.KeyID(pub(h.state))}
	s.push(&protocol.HubMessage{Message: &protocol.HubMessage_PushBundle{PushBundle: &protocol.PushBundle{
		Envelope: h.bundleEnvelope(),
	}}})
	require.Equal(t, protocol.Envelope_BUNDLE, s.accepted().GetDocument())
	s.pushState(next(nil))
	require.Equal(t, protocol.Nack_KEY_REVOKED, s.refused().GetReason())
}

func TestStateThatNeedsANewerBundleFetchesIt(t *testing.T) {
	h, n, s := start(t)
	h.version = 2
	newer := h.bundleEnvelope()
	h.setFetches(func(r *protocol.FetchRequest) *protocol.FetchResponse {
		if !r.GetBundle() {
			return &protocol.FetchResponse{ErrorReason: protocol.Nack_UNKNOWN_PART}
		}
		return &protocol.FetchResponse{Bundle: newer}
	})
	env, _ := h.desired(h.state, func(d *protocol.DesiredState) { d.MinBundleVersion = 2 })
	s.pushState(env)
	require.EqualValues(t, 1, s.accepted().GetGeneration())
	require.EqualValues(t, 2, n.store.Bundle().Version())
}

func TestStateThatNeedsABundleBehindARotatedRootFetchesEachStep(t *testing.T) {
	h, n, s := start(t)
	second := newKey(t)
	old := h.root
	step := func(version uint64, signers ...protocol.Signer) *protocol.Envelope {
		m := h.bundle.Message()
		m.Version = version
		m.Roles[0].Keys = []*protocol.PublicKey{{KeyId: protocol.KeyID(pub(second)), Ed25519: pub(second)}}
		env, err := protocol.SignMessage(protocol.PayloadBundle, m, signers...)
		require.NoError(t, err)
		return env
	}
	steps := map[uint64]*protocol.Envelope{
		1: step(2, protocol.NewEd25519Signer(old), protocol.NewEd25519Signer(second)),
		2: step(3, protocol.NewEd25519Signer(second)),
	}
	h.setFetches(func(r *protocol.FetchRequest) *protocol.FetchResponse {
		return &protocol.FetchResponse{Bundle: steps[r.GetBundleVersion()]}
	})
	env, _ := h.desired(h.state, func(d *protocol.DesiredState) { d.MinBundleVersion = 3 })
	s.pushState(env)
	require.EqualValues(t, 1, s.accepted().GetGeneration())
	require.EqualValues(t, 3, n.store.Bundle().Version())
}

func TestStateThatNeedsABundleThatNobodyHasIsRefused(t *testing.T) {
	h, _, s := start(t)
	same := h.bundle.Envelope()
	h.setFetches(func(*protocol.FetchRequest) *protocol.FetchResponse { return &protocol.FetchResponse{Bundle: same} })
	env, _ := h.desired(h.state, func(d *protocol.DesiredState) { d.MinBundleVersion = 9 })
	s.pushState(env)
	require.Equal(t, protocol.Nack_BUNDLE_TOO_OLD, s.refused().GetReason())
}

func TestMessageAboveItsLimitIsRefusedAndTheNextSessionIsThere(t *testing.T) {
	h, n, s := start(t)
	env, _ := h.desired(h.state, nil)
	s.sendTooLarge()
	require.Equal(t, protocol.Nack_TOO_LARGE, s.refused().GetReason())
	s = h.next()
	s.pushState(env)
	require.EqualValues(t, 1, s.accepted().GetGeneration())
	require.EqualValues(t, 1, n.store.Accepted().Generation)
}

// A report that comes while the hub still reads the refusal would find the stream closed and end the session at once.
func TestReportDoesNotCutOffTheLastRefusal(t *testing.T) {
	h, n := newHub(t), openNode(t)
	require.NoError(t, n.enroll(h))
	var log bytes.Buffer
	n.run(uplink.Config{AgentVersion: "test", Log: slog.New(slog.NewTextHandler(&log, nil))})
	s := h.next()
	s.sendTooLarge()
	require.Equal(t, protocol.Nack_TOO_LARGE, s.refused().GetReason())
	require.ErrorIs(t, s.control.Receive(&protocol.NodeMessage{}, protocol.MaxControlBytes), io.EOF)
	n.seen.set(agent.Report{Epoch: 1, Generation: 1})
	h.next()
	n.stop()
	require.Contains(t, log.String(), link.ErrTooLarge.Error(), "what ended the session")
	require.NotContains(t, log.String(), "link: send")
}
