package command

import (
	"context"
	"crypto/x509"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// EnrollNodeInput is what the node sends.
type EnrollNodeInput struct {
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

// EnrollNode lets a node in with a join token and gives it its first certificate. The join token is the caller's
// credential: there is no principal.
func (s *Service) EnrollNode(ctx context.Context, m Meta, in EnrollNodeInput) (NodeCredentials, error) {
	csr, pub, err := trust.ParseNodeCSR(in.CSRPEM)
	if err != nil {
		return NodeCredentials{}, err
	}
	enrollment := fleet.Enrollment{
		NodeID: db.NewID(), Secret: in.JoinToken, Hostname: in.Hostname, PublicKey: pub,
		CertificateExpiresAt: m.Now.Add(s.CertificateTTL),
	}
	node, err := run(ctx, s, access.Anyone, func(tx db.Tx, _ access.Nothing) (fleet.Node, error) {
		node, did, err := fleet.Enroll(ctx, tx, enrollment, m.Now)
		if err != nil || did == fleet.Unchanged {
			return node, err
		}
		eventType, action := "fleet.node.enrolled", "fleet.node.enroll"
		if did == fleet.Renewed {
			eventType, action = eventRenewed, actionRenew
		}
		return node, change.RecordNode(ctx, tx, m.by(), eventType, action, "", node, "")
	})
	if err != nil {
		return NodeCredentials{}, err
	}
	failpoint.Hit("hub/enroll/committed")
	return s.credentials(csr, node.ID, m.Now)
}

// credentials issues a certificate, after the commit: to a node without a row it would be of no use.
func (s *Service) credentials(csr *x509.CertificateRequest, nodeID string, now time.Time) (NodeCredentials, error) {
	certificate, err := s.Keys.IssueNodeCertificate(csr, nodeID, s.CertificateTTL, now)
	if err != nil {
		return NodeCredentials{}, err
	}
	return NodeCredentials{
		NodeID:      nodeID,
		Certificate: certificate,
		Bundle:      s.Keys.Bundle().Envelope(),
		HubID:       s.Keys.HubID(),
	}, nil
}
