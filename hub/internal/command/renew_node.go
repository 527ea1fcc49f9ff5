package command

import (
	"context"
	"crypto/ed25519"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
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
	if err := do(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) error {
		return s.renewNode(ctx, tx, m, in, pub)
	}); err != nil {
		return NodeCredentials{}, err
	}
	return s.credentials(csr, in.NodeID, m.Now)
}

func (s *Service) renewNode(ctx context.Context, tx db.Tx, m Meta, in RenewNodeInput,
	pub ed25519.PublicKey,
) error {
	node, err := fleet.Get(ctx, tx, in.NodeID)
	if fault.Is(err, fault.NotFound) {
		return fleet.ErrProof()
	}
	if err != nil {
		return err
	}
	if err := fleet.MayRenew(node, pub, fleet.RenewalMessage(in.NodeID, in.CSRPEM, in.IssuedAt),
		in.Signature); err != nil {
		return err
	}
	if err := node.CheckRenewalPace(s.CertificateTTL, m.Now); err != nil {
		return err
	}
	before := string(node.Status(m.Now))
	node, err = fleet.CertificateIssued(ctx, tx, in.NodeID, m.Now.Add(s.CertificateTTL), m.Now)
	if err != nil {
		return err
	}
	return change.RecordNode(ctx, tx, m.by(), eventRenewed, actionRenew, before, node, "")
}
