package command

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// EnrolNodeInput is what the node sends.
type EnrolNodeInput struct {
	JoinToken string
	CSRPEM    string
	Hostname  string
}

// NodeCredentials are what a node connects with.
type NodeCredentials struct {
	NodeID      string
	Certificate trust.NodeCertificate
	Bundle      *protocol.Envelope
	HubID       string
}

// EnrolNode lets a node in with a join token and gives it its first certificate. The join token is the caller's
// credential: there is no principal.
func (s *Service) EnrolNode(ctx context.Context, m Meta, in EnrolNodeInput) (NodeCredentials, error) {
	csr, pub, err := trust.ParseNodeCSR(in.CSRPEM)
	if err != nil {
		return NodeCredentials{}, err
	}
	enrolment := fleet.Enrollment{
		NodeID: db.NewID(), Secret: in.JoinToken, Hostname: in.Hostname, PublicKey: pub,
		CertificateExpiresAt: m.Now.Add(s.CertificateTTL),
	}
	node, err := db.RunTx(ctx, s.DB, func(tx db.Tx) (fleet.Node, error) { return s.enrolNode(ctx, tx, m, enrolment) })
	if err != nil {
		return NodeCredentials{}, err
	}
	failpoint.Hit("hub/enroll/committed")
	// After the commit: a certificate is of no use to a node that is not in the books.
	certificate, err := s.Keys.IssueNodeCertificate(csr, node.ID, s.CertificateTTL, m.Now)
	if err != nil {
		return NodeCredentials{}, err
	}
	return NodeCredentials{
		NodeID: node.ID, Certificate: certificate, Bundle: s.Keys.Bundle().Envelope(),
		HubID: s.Keys.HubID(),
	}, nil
}

func (s *Service) enrolNode(ctx context.Context, tx db.Tx, m Meta, in fleet.Enrollment) (fleet.Node, error) {
	node, enrolled, err := fleet.Enroll(ctx, tx, in, m.Now)
	if err != nil {
		return fleet.Node{}, err
	}
	change := nodeChange{event: "fleet.node.enrolled", action: "fleet.node.enrol", node: node}
	if !enrolled {
		change.event, change.action = eventRenewed, actionRenew
	}
	return node, m.recordNode(ctx, tx, change)
}
