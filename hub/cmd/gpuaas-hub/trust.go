package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func newTrust() *cobra.Command {
	cmd := &cobra.Command{Use: "trust", Short: "Who is trusted: publishers, keys, revocation"}
	cmd.AddCommand(newTrustDelegate(), newTrustRevoke(), newTrustRenew(), newTrustRotateRoot(), newTrustAddRoot(),
		newTrustMinVersion(), newTrustShow())
	return cmd
}

func newTrustDelegate() *cobra.Command {
	var (
		keyDir, passphraseFile, publisher, org string
		prefixes                               []string
		expires                                time.Duration
	)
	cmd := &cobra.Command{
		Use:   "delegate",
		Short: "Let a publisher sign manifests and images for an org's repositories (offline, with the catalog key)",
		Long: `Signs a delegation with the catalog key and prints it as a DSSE envelope in JSON; a platform
admin hands it to the hub with POST /api/v1/admin/publishers. It needs no hub and no network.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if expires <= 0 {
				return fault.New(fault.Malformed, fault.CodeFlagInvalid, "--expires must be longer than nothing: a delegation "+
					"without "+
					"an end is not taken.", nil)
			}
			pub, err := os.ReadFile(publisher)
			if err != nil {
				return fault.New(fault.Malformed, codePublisherKeyUnreadable, "The publisher's public key "+publisher+
					" cannot be read.", err)
			}
			passphrase, err := readPassphrase(passphraseFile, false)
			if err != nil {
				return err
			}
			env, err := trust.Delegate(trust.DelegateOptions{
				CatalogKeyFile: filepath.Join(keyDir, trust.CatalogKeyFile), Passphrase: passphrase, PublisherPEM: pub,
				OrgSlug: org, Prefixes: prefixes, Now: time.Now(), TTL: expires,
			})
			if err != nil {
				return err
			}
			text, err := protocol.EnvelopeToJSON(env)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), string(text))
			return err
		},
	}
	cmd.Flags().StringVar(&keyDir, "key-dir", defaultDataDir+"-keys", "directory with the offline keys")
	cmd.Flags().StringVar(&passphraseFile, "passphrase-file", "", "file with their passphrase (default: asked on the "+
		"terminal)")
	cmd.Flags().StringVar(&publisher, "publisher", "", "the publisher's Ed25519 public key, PEM")
	cmd.Flags().StringVar(&org, "org", "", "slug of the org; empty for platform apps")
	cmd.Flags().StringArrayVar(&prefixes, "prefix", nil, "repository prefix, like org/acme/ (repeatable)")
	cmd.Flags().DurationVar(&expires, "expires", 365*24*time.Hour, "how long the delegation is valid")
	_ = cmd.MarkFlagRequired("publisher")
	_ = cmd.MarkFlagRequired("prefix")
	return cmd
}

func newTrustRevoke() *cobra.Command {
	var (
		f        rootFlags
		keyID    string
		tlsNames []string
	)
	cmd := &cobra.Command{
		Use:   "revoke",
		Short: "Revoke a key (offline, with the root key); a key of the hub's own is replaced at the same time",
		Long: `Signs the next trust bundle with the root key: the key no longer counts, and a key of one of
the hub's own roles is replaced by a new one. A running hub takes the new bundle over within a
resync, or at SIGHUP, and passes it on to the nodes. Documents that nodes have accepted stay valid;
nothing that runs is stopped.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := f.keys()
			if err != nil {
				return err
			}
			hostname, err := os.Hostname()
			if err != nil {
				return err
			}
			catalog := filepath.Join(f.offlineDir(), trust.CatalogKeyFile)
			if done, err := finishCatalogKey(f.dataDir, keyID, catalog, root.Passphrases); done || err != nil {
				return err
			}
			bundle, err := trust.Revoke(trust.RevokeOptions{
				DataDir: f.dataDir, Root: root, KeyID: keyID, Now: time.Now(), BundleTTL: f.lifetime, CatalogKeyFile: catalog +
					".new",
				ServerNames: tlsNames, Hostname: hostname,
			})
			if err != nil {
				return err
			}
			// A new catalog key takes the place of the revoked one, and of no other.
			if trust.HasCatalogKey(bundle, keyID) {
				if err := moveKey(catalog, codeCatalogKeyNotMoved, "The key is revoked"); err != nil {
					return err
				}
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "Key %s is revoked by trust bundle %d.\n", keyID, bundle.Version())
			return err
		},
	}
	f.add(cmd)
	cmd.Flags().StringSliceVar(&tlsNames, "tls-name", nil, "with the key of hub-ca: a name or address that the new "+
		"authority may vouch for (repeatable; default: those of the old one)")
	cmd.Flags().StringVar(&keyID, "key-id", "", "id of the key, 64 hex digits; gpuaas-hub trust show lists them")
	_ = cmd.MarkFlagRequired("key-id")
	return cmd
}

// finishCatalogKey puts the new catalog key into its place, where a revocation of the key with the id was cut off
// before it did.
func finishCatalogKey(dataDir, keyID, catalog string, passphrases []string) (done bool, err error) {
	bundle, err := trust.Newest(filepath.Join(dataDir, "trust"))
	if err != nil || !bundle.Revoked(keyID) || !trust.HasCatalogKey(bundle, keyID) {
		return false, err
	}
	if done, err = trust.Replaced(dataDir, protocol.RoleCatalog, catalog+".new", passphrases); err != nil || !done {
		return false, err
	}
	return true, moveKey(catalog, codeCatalogKeyNotMoved, "The key is revoked")
}

// moveKey puts a new offline key, in the file beside it, in the place of the old one. done says what has happened if
// that fails.
func moveKey(path string, code fault.Code, done string) error {
	err := os.Rename(path+".new", path)
	if err == nil {
		err = durable.SyncDir(filepath.Dir(path))
	}
	if err != nil {
		return fault.New(fault.Internal, code, done+"; move "+path+".new to "+path+" by hand.", err)
	}
	return nil
}

// shownKey is one key of `trust show -o json`.
type shownKey struct {
	Role    string `json:"role"`
	KeyID   string `json:"key_id"`
	Revoked bool   `json:"revoked"`
}

func newTrustShow() *cobra.Command {
	var dataDir, output string
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show the trust bundle: its version and its keys",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			keys, err := trust.Open(dataDir)
			if err != nil {
				return err
			}
			bundle := keys.Bundle()
			var shown []shownKey
			var rootRole string
			for _, role := range bundle.Message().GetRoles() {
				if role.GetName() == protocol.RoleRoot {
					rootRole = protocol.RootRoleDigest(role)
				}
				for _, k := range role.GetKeys() {
					shown = append(shown, shownKey{role.GetName(), k.GetKeyId(), bundle.Revoked(k.GetKeyId())})
				}
			}
			w := cmd.OutOrStdout()
			if output == outputJSON {
				return json.NewEncoder(w).Encode(map[string]any{
					"root_fingerprint": keys.RootFingerprint(), "root_role_digest": rootRole, "trust_domain": keys.TrustDomain(),
					"hub_id":     keys.HubID(),
					"expires_at": bundle.Message().GetExpiresAt().AsTime(), "root_threshold": bundle.RootThreshold(),
					"version": bundle.Version(), "epoch": bundle.Epoch(), "min_versions": minVersions(bundle), "keys": shown,
					"revoked_key_ids": bundle.Message().GetRevokedKeyIds(),
				})
			}
			_, _ = fmt.Fprintf(w, "trust domain      %s\nroot fingerprint  %s\nroot role         %s\nbundle            "+
				"version %d, epoch %d, %s\n\n",
				keys.TrustDomain(), keys.RootFingerprint(), rootRole, bundle.Version(), bundle.Epoch(), lifeOf(keys, time.Now()))
			for _, k := range shown {
				mark := ""
				if k.Revoked {
					mark = "  revoked"
				}
				_, _ = fmt.Fprintf(w, "%-8s  %s%s\n", k.Role, k.KeyID, mark)
			}
			for _, m := range bundle.Message().GetMinVersions() {
				_, _ = fmt.Fprintf(w, "%s starts from version %s on\n", m.GetAppSlug(), m.GetVersion())
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "directory of the hub's data")
	daemon.ChoiceVarP(cmd.Flags(), &output, "output", "o", "text", []string{"text", outputJSON}, "text or json")
	return cmd
}

// lifeOf says until when the bundle is current.
func lifeOf(keys *trust.Keys, now time.Time) string {
	end, soon, ok := keys.BundleEnd(now)
	text := "current until " + end.UTC().Format(time.RFC3339)
	switch {
	case !ok:
		return "without an end: sign the next one with `gpuaas-hub trust renew`"
	case now.After(end):
		return "ended at " + end.UTC().Format(time.RFC3339) + ": sign the next one with `gpuaas-hub trust renew`"
	case soon:
		return text + ": sign the next one soon with `gpuaas-hub trust renew`"
	}
	return text
}

// minVersions are the lowest versions that may start, by app slug.
func minVersions(bundle protocol.Bundle) map[string]string {
	out := map[string]string{}
	for _, m := range bundle.Message().GetMinVersions() {
		out[m.GetAppSlug()] = m.GetVersion()
	}
	return out
}
