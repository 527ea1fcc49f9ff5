package capacity

import (
	"context"
	"crypto/rsa"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	"golang.org/x/crypto/ssh"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// The sets of SSH keys that an allocation has. Each is replaced as a whole, and apart from the other.
const (
	SSHKeysOfOperator = "operator"
	SSHKeysOfApp      = "app"
)

// minRSABits is the size below which OpenSSH and NIST SP 800-131A take no RSA key.
const minRSABits = 2048

// SSHKey lets its holder log in to an account of the allocation's node.
type SSHKey struct {
	User string `json:"user"`
	// PublicKey is a line of authorized_keys without options.
	PublicKey string `json:"public_key"`
	// ExpiresAt is zero for a key that lets in until it is taken out.
	ExpiresAt time.Time `json:"expires_at,omitzero"`
}

// SSHKeySet is one of the two sets of an allocation. One that was never set is empty, and of version 0.
type SSHKeySet struct {
	AllocationID, ManagedBy, OrgSlug string
	Keys                             []SSHKey
	ResourceVersion                  int64
	UpdatedAt                        time.Time
}

// Fingerprint names the key as ssh-keygen -l does.
func (k SSHKey) Fingerprint() string {
	key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(k.PublicKey))
	if err != nil {
		return ""
	}
	return ssh.FingerprintSHA256(key)
}

// refuses says what is wrong with the text of a public key; empty for a good one.
func refuses(text string) string {
	if strings.ContainsFunc(text, unicode.IsControl) {
		return "must be one line"
	}
	key, _, options, _, err := ssh.ParseAuthorizedKey([]byte(text))
	switch {
	case err != nil:
		return "is no line of authorized_keys"
	case len(options) > 0:
		return "must have no options"
	}
	switch key.Type() {
	case ssh.KeyAlgoED25519, ssh.KeyAlgoSKED25519, ssh.KeyAlgoECDSA256, ssh.KeyAlgoECDSA384, ssh.KeyAlgoECDSA521,
		ssh.KeyAlgoSKECDSA256:
		return ""
	case ssh.KeyAlgoRSA:
		if crypto, is := key.(ssh.CryptoPublicKey); is {
			if k, is := crypto.CryptoPublicKey().(*rsa.PublicKey); is && k.N.BitLen() >= minRSABits {
				return ""
			}
		}
		return fmt.Sprintf("must have at least %d bits", minRSABits)
	}
	return "must be an Ed25519, ECDSA or RSA key"
}

func (s SSHKeySet) check() error {
	seen := map[SSHKey]bool{}
	for i, k := range s.Keys {
		reason := refuses(k.PublicKey)
		id := SSHKey{User: k.User, PublicKey: k.Fingerprint()}
		if reason == "" && seen[id] {
			reason = "stands twice"
		}
		if reason != "" {
			return fault.New(fault.Unprocessable, codeSSHKeyInvalid, "An SSH key cannot be used.", nil).
				WithField(fmt.Sprintf("/keys/%d/public_key", i), reason).Permanent()
		}
		seen[id] = true
	}
	return nil
}

const sshKeyColumns = `k.allocation_id, k.managed_by, k.org_slug, k.keys, k.resource_version, k.updated_at`

func scanSSHKeys(row pgx.CollectableRow) (s SSHKeySet, err error) {
	var keys []byte
	if err = row.Scan(&s.AllocationID, &s.ManagedBy, &s.OrgSlug, &keys, &s.ResourceVersion, &s.UpdatedAt); err == nil {
		err = json.Unmarshal(keys, &s.Keys)
	}
	return s, err
}

// GetSSHKeys reads one of the sets of an allocation.
func GetSSHKeys(ctx context.Context, tx db.Tx, a Allocation, managedBy string) (SSHKeySet, error) {
	s, err := db.SelectOne(ctx, tx, scanSSHKeys, `SELECT `+sshKeyColumns+` FROM ssh_key_sets k
		WHERE k.allocation_id = $1 AND k.managed_by = $2`, a.ID, managedBy)
	if db.IsNoRows(err) {
		return SSHKeySet{AllocationID: a.ID, ManagedBy: managedBy, UpdatedAt: a.CreatedAt}, nil
	}
	return s, err
}

// HasSSHKeys reports whether one of the sets of an allocation has a key.
func HasSSHKeys(ctx context.Context, tx db.Tx, allocationID string) (bool, error) {
	return db.Value[bool](ctx, tx,
		`SELECT EXISTS (SELECT 1 FROM ssh_key_sets WHERE allocation_id = $1 AND keys <> '[]'::JSONB)`, allocationID)
}

// PutSSHKeys replaces one of the sets of an allocation, and returns it as it was and as it is.
func PutSSHKeys(ctx context.Context, tx db.Tx, a Allocation, in SSHKeySet, now time.Time,
) (before, after SSHKeySet, err error) {
	if err := a.errEnded(); err != nil {
		return before, after, err
	}
	if err := in.check(); err != nil {
		return before, after, err
	}
	if err := checkAccounts(ctx, tx, a, in); err != nil {
		return before, after, err
	}
	if before, err = GetSSHKeys(ctx, tx, a, in.ManagedBy); err != nil {
		return before, after, err
	}
	in.AllocationID, in.ResourceVersion, in.UpdatedAt = a.ID, before.ResourceVersion+1, now
	return before, in, putSSHKeys(ctx, tx, in)
}

func putSSHKeys(ctx context.Context, tx db.Tx, s SSHKeySet) error {
	keys, err := json.Marshal(append([]SSHKey{}, s.Keys...))
	if err != nil {
		return err
	}
	return tx.Queue(ctx,
		`INSERT INTO ssh_key_sets (allocation_id, managed_by, org_slug, keys, resource_version, updated_at)
		VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (allocation_id, managed_by) DO UPDATE SET org_slug = EXCLUDED.org_slug,
			keys = EXCLUDED.keys, resource_version = EXCLUDED.resource_version, updated_at = EXCLUDED.updated_at`,
		s.AllocationID, s.ManagedBy, s.OrgSlug, string(keys), s.ResourceVersion, s.UpdatedAt)
}

// checkAccounts refuses accounts of the node that another project has keys of, more keys than a state may have, and
// more than half of them for one org.
func checkAccounts(ctx context.Context, tx db.Tx, a Allocation, in SSHKeySet) error {
	held, err := DesiredSSHKeys(ctx, tx, a.NodeID)
	if err != nil {
		return err
	}
	others, ofOrg := 0, len(in.Keys)
	for _, k := range held {
		if k.GetAllocationId() == a.ID && k.GetManagedBy() == in.ManagedBy {
			continue
		}
		others++
		if k.GetOrgSlug() == in.OrgSlug {
			ofOrg++
		}
		taken := func(mine SSHKey) bool { return mine.User == k.GetUser() }
		if i := slices.IndexFunc(in.Keys, taken); i >= 0 && k.GetProjectId() != a.ProjectID {
			return fault.New(fault.Conflict, codeSSHAccountTaken, "Another project has SSH keys of this account on the node.",
				nil).WithField(fmt.Sprintf("/keys/%d/user", i), "is taken").Permanent()
		}
	}
	if others+len(in.Keys) > protocol.MaxSSHKeys || ofOrg > protocol.MaxSSHKeys/2 {
		return fault.New(fault.Conflict, CodeInsufficient, "The node has no room for more SSH keys.", nil)
	}
	return nil
}

// DesiredSSHKeys describes who may log in to a node, for its state: the keys of its active allocations.
func DesiredSSHKeys(ctx context.Context, tx db.Tx, nodeID string) (out []*protocol.SSHKey, err error,
) {
	type held struct {
		SSHKeySet
		projectID string
	}
	sets, err := db.Select(ctx, tx, func(row pgx.CollectableRow) (h held, err error) {
		var keys []byte
		if err = row.Scan(&h.AllocationID, &h.ManagedBy, &h.OrgSlug, &keys, &h.projectID); err == nil {
			err = json.Unmarshal(keys, &h.Keys)
		}
		return h, err
	}, `SELECT k.allocation_id, k.managed_by, k.org_slug, k.keys, a.project_id FROM allocations a
		JOIN ssh_key_sets k ON k.allocation_id = a.id WHERE a.node_id = $1 AND a.released_at IS NULL
		AND a.status = 'active'`, nodeID)
	for _, s := range sets {
		for _, k := range s.Keys {
			key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(k.PublicKey))
			if err != nil {
				return nil, fmt.Errorf("stored SSH key: %w", err)
			}
			p := &protocol.SSHKey{
				AllocationId: s.AllocationID, ProjectId: s.projectID, OrgSlug: s.OrgSlug, ManagedBy: s.ManagedBy, User: k.User,
				PublicKey: key.Marshal(),
			}
			if !k.ExpiresAt.IsZero() {
				p.ExpiresAt = timestamppb.New(k.ExpiresAt)
			}
			out = append(out, p)
		}
	}
	return out, err
}

// AdoptedSSHKeys is a set of SSH keys that a node's state has in another way than the rows had.
type AdoptedSSHKeys struct {
	Allocation    Allocation
	Before, After SSHKeySet
}

// AdoptSSHKeys gives the allocations of a node the keys that its state has, and returns the sets that were others. The
// comments of their keys are lost.
func AdoptSSHKeys(ctx context.Context, tx db.Tx, nodeID string, named []*protocol.SSHKey, now time.Time,
) (adopted []AdoptedSSHKeys, err error) {
	held, err := selectAllocations(ctx, tx, `WHERE a.node_id = $1 AND a.status = 'active' ORDER BY a.id`, nodeID)
	if err != nil {
		return nil, err
	}
	for _, a := range held {
		for _, managedBy := range []string{SSHKeysOfOperator, SSHKeysOfApp} {
			before, err := GetSSHKeys(ctx, tx, a, managedBy)
			if err != nil {
				return nil, err
			}
			after := before
			after.Keys, after.ResourceVersion, after.UpdatedAt = nil, before.ResourceVersion+1, now
			for _, k := range named {
				key, err := ssh.ParsePublicKey(k.GetPublicKey())
				if err != nil || k.GetAllocationId() != a.ID || k.GetManagedBy() != managedBy {
					continue
				}
				text := strings.TrimSpace(string(ssh.MarshalAuthorizedKey(key)))
				mine := SSHKey{User: k.GetUser(), PublicKey: text}
				if k.GetExpiresAt() != nil {
					mine.ExpiresAt = k.GetExpiresAt().AsTime()
				}
				after.OrgSlug, after.Keys = k.GetOrgSlug(), append(after.Keys, mine)
			}
			if sameKeys(before.Keys, after.Keys) {
				continue
			}
			if err := putSSHKeys(ctx, tx, after); err != nil {
				return nil, err
			}
			adopted = append(adopted, AdoptedSSHKeys{a, before, after})
		}
	}
	return adopted, nil
}

// sameKeys reports whether two sets let the same people in; order and comments do not matter.
func sameKeys(a, b []SSHKey) bool {
	in := map[SSHKey]bool{}
	for _, k := range a {
		in[SSHKey{k.User, k.Fingerprint(), k.ExpiresAt.UTC()}] = true
	}
	return len(a) == len(b) && !slices.ContainsFunc(b, func(k SSHKey) bool {
		return !in[SSHKey{k.User, k.Fingerprint(), k.ExpiresAt.UTC()}]
	})
}
