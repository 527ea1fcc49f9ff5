package httpapi

import (
	"context"
	"encoding/base64"
	"slices"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// ListNodes lists the nodes of the mesh.
func (s *Server) ListNodes(ctx context.Context, r ListNodesRequestObject) (ListNodesResponseObject, error) {
	now := metaFrom(ctx).Now
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]query.Node, error) {
		return s.Queries.Nodes(ctx, principalOf(ctx), query.NodeFilter{
			Status: string(r.Params.Status), After: p.After, Limit: p.Limit, Now: now,
		})
	}, func(v query.Node) string { return v.ID })
	return ListNodes200JSONResponse{
		Items:      views(items, func(n query.Node) Node { return nodeView(n, now) }),
		NextCursor: next,
	}, err
}

// GetNode gives one node, with what it refused, on request once it has changed.
func (s *Server) GetNode(ctx context.Context, r GetNodeRequestObject) (GetNodeResponseObject, error) {
	n, err := s.Queries.Node(ctx, principalOf(ctx), r.NodeID, watchOf(r.Params.After, r.Params.Wait))
	return GetNode200JSONResponse(nodeView(n, metaFrom(ctx).Now)), err
}

// DrainNode stops new placements on a node.
func (s *Server) DrainNode(ctx context.Context, r DrainNodeRequestObject) (DrainNodeResponseObject, error) {
	node, err := s.changedNode(ctx, r.NodeID, s.Commands.DrainNode(ctx, metaFrom(ctx), r.NodeID))
	return DrainNode200JSONResponse(node), err
}

// UndrainNode lets new things be placed on a node again.
func (s *Server) UndrainNode(ctx context.Context, r UndrainNodeRequestObject) (UndrainNodeResponseObject, error) {
	node, err := s.changedNode(ctx, r.NodeID, s.Commands.UndrainNode(ctx, metaFrom(ctx), r.NodeID))
	return UndrainNode200JSONResponse(node), err
}

// RemoveNode takes a node out of the mesh for good; without a body, one that is drained and empty.
func (s *Server) RemoveNode(ctx context.Context, r RemoveNodeRequestObject) (RemoveNodeResponseObject, error) {
	var in command.RemoveNodeInput
	if r.Body != nil {
		in = command.RemoveNodeInput{Lost: r.Body.Lost, Reason: r.Body.Reason}
	}
	node, err := s.changedNode(ctx, r.NodeID, s.Commands.RemoveNode(ctx, metaFrom(ctx), r.NodeID, in))
	return RemoveNode200JSONResponse(node), err
}

// ReleaseNode lets a quarantined node go on.
func (s *Server) ReleaseNode(ctx context.Context, r ReleaseNodeRequestObject) (ReleaseNodeResponseObject, error) {
	node, err := s.changedNode(ctx, r.NodeID, s.Commands.ReleaseNode(ctx, metaFrom(ctx), r.NodeID))
	return ReleaseNode200JSONResponse(node), err
}

// BanNode shuts a node out for good.
func (s *Server) BanNode(ctx context.Context, r BanNodeRequestObject) (BanNodeResponseObject, error) {
	node, err := s.changedNode(ctx, r.NodeID, s.Commands.BanNode(ctx, metaFrom(ctx), r.NodeID, r.Body.Reason))
	return BanNode200JSONResponse(node), err
}

// changedNode views a node after a command, which returned err.
func (s *Server) changedNode(ctx context.Context, nodeID string, err error) (Node, error) {
	if err != nil {
		return Node{}, err
	}
	n, err := s.Queries.Node(ctx, principalOf(ctx), nodeID, query.Watch{})
	return nodeView(n, metaFrom(ctx).Now), err
}

func nodeView(n query.Node, now time.Time) Node {
	facts := n.Facts
	out := Node{
		ID: n.ID, ResourceVersion: n.ResourceVersion, Hostname: n.Hostname, Status: NodeStatus(n.Status(now)),
		Conditions:   n.Conditions,
		Accelerators: []NodeAccelerator{},
		AgentVersion: n.AgentVersion, Os: facts.GetOs(), Kernel: facts.GetKernel(), Architecture: facts.GetArchitecture(),
		ContainerdVersion: facts.GetContainerdVersion(), RuncVersion: facts.GetRuncVersion(),
		CPUCores: int32(facts.GetCpuCores()), MemoryMib: int64(facts.GetMemoryBytes() >> 20),
		Generation: int64(n.Generation), AcceptedGeneration: int64(n.AcceptedGeneration), BanReason: n.BanReason,
		QuarantineReason: n.QuarantineReason,
		RemovedAt:        n.RemovedAt, RemoveReason: n.RemoveReason,
		CertificateExpiresAt: n.CertificateExpiresAt, LastSeenAt: n.LastSeenAt, CreatedAt: n.CreatedAt,
	}
	if n.IsQuarantined() {
		// The hub's own, beside what the node says of itself.
		out.Conditions = append(slices.Clone(n.Conditions), n.QuarantineReason)
	}
	out.Accelerators = append(out.Accelerators, views(n.Accelerators, acceleratorView)...)
	out.OneOrgBecause = n.SingleOrgConditions()
	for _, r := range n.Refusals {
		out.Refusals = append(out.Refusals, Refusal{
			Document: RefusalDocument(r.Document), Epoch: int64(r.Epoch), Generation: int64(r.Generation), Reason: r.Reason,
			Detail: r.Detail, At: r.At,
		})
	}
	if len(out.Refusals) > 0 {
		out.LastRefusal = out.Refusals[0]
	}
	return out
}

func acceleratorView(a *protocol.Accelerator) NodeAccelerator {
	out := NodeAccelerator{
		ID: a.GetId(), Vendor: a.GetVendor(), Model: a.GetModel(), MemoryMib: int64(a.GetMemoryBytes() >> 20),
		Health: a.GetHealth(), HealthReason: a.GetHealthReason(), PciAddress: a.GetPciAddress(), NumaNode: -1,
		Cores:         int64(a.GetCores()),
		DriverVersion: a.GetDriverVersion(), RuntimeVersion: a.GetRuntimeVersion(),
	}
	if a.NumaNode != nil {
		out.NumaNode = int64(a.GetNumaNode())
	}
	out.Links = views(a.GetLinks(), func(l *protocol.AcceleratorLink) AcceleratorLink {
		return AcceleratorLink{PeerID: l.GetPeerId(), Kind: l.GetKind(), Count: int64(l.GetCount())}
	})
	out.Partitions = views(a.GetPartitions(), func(p *protocol.AcceleratorPartition) AcceleratorPartition {
		return AcceleratorPartition{
			ID: p.GetId(), Profile: p.GetProfile(), MemoryMib: int64(p.GetMemoryBytes() >> 20),
			Sharing: AcceleratorSharing(p.GetSharing()),
		}
	})
	return out
}

// ListJoinTokens lists join tokens without their secrets.
func (s *Server) ListJoinTokens(ctx context.Context,
	r ListJoinTokensRequestObject,
) (ListJoinTokensResponseObject, error) {
	now := metaFrom(ctx).Now
	items, next, err := pageByID(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]fleet.JoinToken, error) {
		return s.Queries.JoinTokens(ctx, principalOf(ctx), p)
	}, func(v fleet.JoinToken) string { return v.ID })
	return ListJoinTokens200JSONResponse{Items: views(items, func(t fleet.JoinToken) JoinToken {
		return s.joinTokenView(t, now)
	}), NextCursor: next}, err
}

// CreateJoinToken makes a one-time join token.
func (s *Server) CreateJoinToken(ctx context.Context,
	r CreateJoinTokenRequestObject,
) (CreateJoinTokenResponseObject, error) {
	m := metaFrom(ctx)
	created, err := s.Commands.CreateJoinToken(ctx, m, fleet.NewToken{
		Description: r.Body.Description, TTL: time.Duration(r.Body.ExpiresInSeconds) * time.Second,
	})
	if err != nil {
		return nil, err
	}
	out := s.joinTokenView(created.Token, m.Now)
	out.Token = created.Secret
	return CreateJoinToken201JSONResponse(out), nil
}

func (s *Server) joinTokenView(t fleet.JoinToken, now time.Time) JoinToken {
	return JoinToken{
		ID: t.ID, RootFingerprint: s.Keys.RootFingerprint(), Description: t.Description,
		Status: JoinTokenStatus(t.Status(now)),
		NodeID: t.NodeID, ExpiresAt: t.ExpiresAt, CreatedAt: t.CreatedAt,
	}
}

// GetTrustBundle returns the newest trust bundle, without a credential: the bundle proves itself by its signature.
func (s *Server) GetTrustBundle(context.Context, GetTrustBundleRequestObject) (GetTrustBundleResponseObject, error) {
	return GetTrustBundle200JSONResponse(envelopeView(s.Keys.Bundle().Envelope())), nil
}

// EnrollNode lets a node in with a join token.
func (s *Server) EnrollNode(ctx context.Context, r EnrollNodeRequestObject) (EnrollNodeResponseObject, error) {
	credentials, err := s.Commands.EnrollNode(ctx, metaFrom(ctx), command.EnrollNodeInput{
		JoinToken: r.Body.JoinToken,
		CSRPEM:    r.Body.CsrPem, Hostname: r.Body.Hostname,
	})
	if err != nil {
		return nil, err
	}
	return EnrollNode201JSONResponse(s.credentialsView(credentials)), nil
}

// RenewNode gives a node a new certificate.
func (s *Server) RenewNode(ctx context.Context, r RenewNodeRequestObject) (RenewNodeResponseObject, error) {
	signature, err := base64.StdEncoding.DecodeString(r.Body.Signature)
	if err != nil {
		return nil, fault.New(fault.Malformed, codeSignatureEncoding, "The signature is not standard base64.",
			err).WithField("/signature", "not standard base64")
	}
	credentials, err := s.Commands.RenewNode(ctx, metaFrom(ctx), command.RenewNodeInput{
		NodeID: r.Body.NodeID, CSRPEM: r.Body.CsrPem, IssuedAt: r.Body.IssuedAt, Signature: signature,
	})
	if err != nil {
		return nil, err
	}
	return RenewNode200JSONResponse(s.credentialsView(credentials)), nil
}

func (s *Server) credentialsView(c command.NodeCredentials) NodeCredentials {
	return NodeCredentials{
		NodeID: c.NodeID, CertificatePem: c.Certificate.CertificatePEM, Chain: []string{c.Certificate.ChainPEM},
		HubID:       c.HubID,
		TrustBundle: envelopeView(c.Bundle), SessionAddr: s.SessionAddr, RegistryHost: s.RegistryHost,
	}
}

func envelopeView(env *protocol.Envelope) SignedEnvelope {
	out := SignedEnvelope{
		PayloadType: env.GetPayloadType(), Payload: base64.StdEncoding.EncodeToString(env.GetPayload()),
		Signatures: []EnvelopeSignature{},
	}
	for _, sig := range env.GetSignatures() {
		out.Signatures = append(out.Signatures, EnvelopeSignature{
			Keyid: sig.GetKeyId(),
			Sig:   base64.StdEncoding.EncodeToString(sig.GetSignature()),
		})
	}
	return out
}
