package command

import (
	"context"
	"crypto/ed25519"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	eventRenewed = "fleet.node.certificate_renewed"
	actionRenew  = "fleet.node.renew"
)

// RenewNodeInput is what the node sends.
type RenewNodeInput struct {
	NodeID string
	CSRPEM string
	// IssuedAt is the very text that was signed.
	IssuedAt  string
	Signature []byte
}

// RenewNode gives a node a new certificate by proof of its key, also when the last one has expired. The signature is
// the caller's credential: there is no principal.
func (s *Service) RenewNode(ctx context.Context, m Meta, in RenewNodeInput) (NodeCredentials, error) {
	csr, pub, err := trust.ParseNodeCSR(in.CSRPEM)
	if err != nil {
		return NodeCredentials{}, err
	}
	if _, err = db.RunTx(ctx, s.DB, func(tx db.Tx) (fleet.Node, error) {
		return s.renewNode(ctx, tx, m, in, pub)
	}); err != nil {
		return NodeCredentials{}, err
	}
	certificate, err := s.Keys.IssueNodeCertificate(csr, in.NodeID, s.CertificateTTL, m.Now)
	if err != nil {
		return NodeCredentials{}, err
	}
	return NodeCredentials{
		NodeID: in.NodeID, Certificate: certificate, Bundle: s.Keys.Bundle().Envelope(),
		HubID: s.Keys.HubID(),
	}, nil
}

func (s *Service) renewNode(ctx context.Context, tx db.Tx, m Meta, in RenewNodeInput,
	pub ed25519.PublicKey,
) (fleet.Node, error) {
	node, err := fleet.Get(ctx, tx, in.NodeID)
	if fault.Is(err, fault.NotFound) {
		return fleet.Node{}, fleet.ErrProof()
	}
	if err != nil {
		return fleet.Node{}, err
	}
	if err := fleet.MayRenew(node, pub, fleet.RenewalMessage(in.NodeID, in.CSRPEM, in.IssuedAt),
		in.Signature); err != nil {
		return fleet.Node{}, err
	}
	node, err = fleet.CertificateIssued(ctx, tx, in.NodeID, m.Now.Add(s.CertificateTTL), m.Now)
	if err != nil {
		return fleet.Node{}, err
	}
	return node, m.recordNode(ctx, tx, nodeChange{event: eventRenewed, action: actionRenew, node: node})
}
