package change

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// identityRenewal is how long the key of an app instance is the newest one, and stays valid after that: so long its
	// node may be away with the one before.
	identityRenewal = 24 * time.Hour
	// identityRetry is when the identity on a node that is away is checked again: it keeps the key that it has.
	identityRetry = 10 * time.Minute
)

// Hub is how an app instance reaches the hub.
type Hub struct {
	URL string
	// CA are the certificates, in PEM, that the hub's is verified with.
	CA []byte
}

// identityFile is what the app reads.
type identityFile struct {
	HubURL           string `json:"hub_url"`
	HubCAPEM         string `json:"hub_ca_pem"`
	ProjectID        string `json:"project_id"`
	AppInstanceID    string `json:"app_instance_id"`
	ServiceAccountID string `json:"service_account_id"`
	KeyID            string `json:"key_id"`
	PrivateKeyPEM    string `json:"private_key_pem"`
	NodeID           string `json:"node_id"`
	NodePublicKeyPEM string `json:"node_public_key_pem"`
}

// IssueIdentity gives an app instance a new key of its service account, which it makes where there is none, and seals
// it to the member's node. The key is in no row and no log but there.
func IssueIdentity(ctx context.Context, tx db.Tx, by By, hub Hub, i secret.Identity) error {
	node, sealingKey, err := nodeToSealFor(ctx, tx, i.NodeID)
	if err != nil {
		return err
	}
	key, err := iam.NewKey(db.NewID(), by.Now)
	if err != nil {
		return err
	}
	sa, made, err := iam.RenewInstanceAccount(ctx, tx, iam.ServiceAccount{
		ID: db.NewID(), OrgID: i.OrgID, ProjectID: i.ProjectID, AppInstanceID: i.InstanceID, Name: "App instance",
	}, key, identityRenewal)
	if err != nil {
		return err
	}
	der, err := x509.MarshalPKIXPublicKey(node.PublicKey)
	if err != nil {
		return err
	}
	text, err := json.Marshal(identityFile{
		HubURL: hub.URL, HubCAPEM: string(hub.CA), ProjectID: i.ProjectID, AppInstanceID: i.InstanceID,
		ServiceAccountID: sa.ID, KeyID: key.ID, PrivateKeyPEM: key.PrivateKeyPEM,
		NodeID: i.NodeID, NodePublicKeyPEM: string(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der})),
	})
	if err != nil {
		return err
	}
	sealed, err := protocol.Seal(sealingKey, i.MemberID, protocol.InstanceIdentityParameter, text)
	if err != nil {
		return err
	}
	i.RenewAt = by.Now.Add(identityRenewal)
	if err := secret.PutIdentity(ctx, tx, i, sealed); err != nil {
		return err
	}
	event := "iam.service_account.key_rotated"
	if made {
		event = "iam.service_account.created"
	}
	return recordAccount(ctx, tx, by, event, sa, map[string]any{"app_instance_id": i.InstanceID, "key_id": key.ID})
}

// RenewIdentity issues the next key of an identity that is due, and changes its node's intent. While the node is away,
// the app keeps the key that it has.
func RenewIdentity(ctx context.Context, tx db.Tx, by By, hub Hub, i secret.Identity) error {
	if due, err := secret.IsIdentityDue(ctx, tx, i.MemberID, by.Now); err != nil || !due {
		return err // it has ended, or another process was faster
	}
	node, err := fleet.Get(ctx, tx, i.NodeID)
	if err != nil {
		return err
	}
	if !node.Connected(by.Now) || !node.Syncable() {
		return secret.PostponeIdentity(ctx, tx, i.MemberID, by.Now.Add(identityRetry))
	}
	if err := IssueIdentity(ctx, tx, by, hub, i); err != nil {
		return err
	}
	return fleet.BumpIntent(ctx, tx, i.NodeID)
}

// endIdentity ends the service account of an app instance, if it has one.
func endIdentity(ctx context.Context, tx db.Tx, by By, instanceID string) error {
	sa, ended, err := iam.EndInstanceAccount(ctx, tx, instanceID, by.Now)
	if err != nil || !ended {
		return err
	}
	return recordAccount(ctx, tx, by, "iam.service_account.deleted", sa, map[string]any{"app_instance_id": instanceID})
}

// EndIdentitiesOn ends the service accounts of all app instances on a node.
func EndIdentitiesOn(ctx context.Context, tx db.Tx, by By, nodeID string) error {
	instances, err := secret.IdentitiesOn(ctx, tx, nodeID)
	for _, id := range instances {
		if err := endIdentity(ctx, tx, by, id); err != nil {
			return err
		}
	}
	return err
}

func recordAccount(ctx context.Context, tx db.Tx, by By, event string, sa iam.ServiceAccount,
	after map[string]any,
) error {
	return Record(ctx, tx, by, Entry{
		Event:        event,
		Action:       iam.ServiceAccountWrite,
		ResourceType: "service_account",
		ResourceID:   sa.ID,
		Version:      sa.ResourceVersion,
		OrgID:        sa.OrgID,
		ProjectID:    sa.ProjectID,
		After:        after,
	})
}

// SealingKey returns the key that a node opens its secrets with.
func SealingKey(ctx context.Context, tx db.Tx, nodeID string) (protocol.Verified[*protocol.SealingKey], error) {
	_, key, err := nodeToSealFor(ctx, tx, nodeID)
	return key, err
}

func nodeToSealFor(ctx context.Context, tx db.Tx, nodeID string) (node fleet.Node,
	key protocol.Verified[*protocol.SealingKey], err error,
) {
	if node, err = fleet.Get(ctx, tx, nodeID); err != nil {
		return node, key, err
	}
	if err = fleet.LoadFacts(ctx, tx, &node); err != nil {
		return node, key, err
	}
	if key, err = protocol.VerifySealingKey(node.Facts.GetSealingKey(), node.ID, node.PublicKey); err != nil {
		err = capacity.FeatureMissing()
	}
	return node, key, err
}
