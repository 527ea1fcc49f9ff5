package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func newTrust() *cobra.Command {
	cmd := &cobra.Command{Use: "trust", Short: "Who is trusted: publishers, keys, revocation"}
	cmd.AddCommand(newTrustDelegate(), newTrustRevoke(), newTrustShow())
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
		Long: `Signs a delegation with the catalog key and prints it as a DSSE envelope in JSON; a platform admin hands it to the hub with
POST /api/v1/admin/publishers. It needs no hub and no network.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if expires <= 0 {
				return fault.New(fault.Malformed, "flag_invalid", "--expires must be longer than nothing: a delegation without an end is not taken.", nil)
			}
			pub, err := os.ReadFile(publisher)
			if err != nil {
				return fault.New(fault.Malformed, "publisher_key_unreadable", "The publisher's public key "+publisher+" cannot be read.", err)
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
	cmd.Flags().StringVar(&passphraseFile, "passphrase-file", "", "file with their passphrase (default: asked on the terminal)")
	cmd.Flags().StringVar(&publisher, "publisher", "", "the publisher's Ed25519 public key, PEM")
	cmd.Flags().StringVar(&org, "org", "", "slug of the org; empty for platform apps")
	cmd.Flags().StringArrayVar(&prefixes, "prefix", nil, "repository prefix, like org/acme/ (repeatable)")
	cmd.Flags().DurationVar(&expires, "expires", 365*24*time.Hour, "how long the delegation is valid")
	_ = cmd.MarkFlagRequired("publisher")
	_ = cmd.MarkFlagRequired("prefix")
	return cmd
}

func newTrustRevoke() *cobra.Command {
	var dataDir, keyDir, rootKeyFile, passphraseFile, keyID string
	cmd := &cobra.Command{
		Use:   "revoke",
		Short: "Revoke a key (offline, with the root key); a key of the hub's own is replaced at the same time",
		Long: `Signs the next trust bundle with the root key: the key no longer counts, and a key of one of the hub's own roles is replaced
by a new one. A running hub takes the new bundle over within a resync, or at SIGHUP, and passes it on to the nodes. Documents
that nodes have accepted stay valid; nothing that runs is stopped.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rootKeyFile == "" {
				rootKeyFile = filepath.Join(keyDir, trust.RootKeyFile)
			}
			passphrase, err := readPassphrase(passphraseFile, false)
			if err != nil {
				return err
			}
			catalog := filepath.Join(keyDir, trust.CatalogKeyFile)
			bundle, err := trust.Revoke(trust.RevokeOptions{
				DataDir: dataDir, RootKeyFile: rootKeyFile, Passphrase: passphrase, KeyID: keyID, Now: time.Now(), CatalogKeyFile: catalog + ".new",
			})
			if err != nil {
				return err
			}
			// A new catalog key takes the place of the revoked one.
			if err := os.Rename(catalog+".new", catalog); err != nil && !os.IsNotExist(err) {
				return fault.New(fault.Internal, "catalog_key_not_moved", "The key is revoked; move "+catalog+".new to "+catalog+" by hand.", err)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "Key %s is revoked by trust bundle %d.\n", keyID, bundle.Version())
			return err
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "directory of the hub's data")
	cmd.Flags().StringVar(&keyDir, "key-dir", defaultDataDir+"-keys", "directory with the offline keys")
	cmd.Flags().StringVar(&rootKeyFile, "root-key-file", "", "the root key (default <key-dir>/"+trust.RootKeyFile+")")
	cmd.Flags().StringVar(&passphraseFile, "passphrase-file", "", "file with their passphrase (default: asked on the terminal)")
	cmd.Flags().StringVar(&keyID, "key-id", "", "id of the key, 64 hex digits (see `gpuaas-hub trust show`)")
	_ = cmd.MarkFlagRequired("key-id")
	return cmd
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
			for _, role := range bundle.Message().GetRoles() {
				for _, k := range role.GetKeys() {
					shown = append(shown, shownKey{role.GetName(), k.GetKeyId(), bundle.Revoked(k.GetKeyId())})
				}
			}
			w := cmd.OutOrStdout()
			if output == outputJSON {
				return json.NewEncoder(w).Encode(map[string]any{
					"root_fingerprint": keys.RootFingerprint(), "trust_domain": keys.TrustDomain(), "hub_id": keys.HubID(),
					"version": bundle.Version(), "epoch": bundle.Epoch(), "keys": shown, "revoked_key_ids": bundle.Message().GetRevokedKeyIds(),
				})
			}
			_, _ = fmt.Fprintf(w, "trust domain      %s\nroot fingerprint  %s\nbundle            version %d, epoch %d\n\n", keys.TrustDomain(), keys.RootFingerprint(), bundle.Version(), bundle.Epoch())
			for _, k := range shown {
				mark := ""
				if k.Revoked {
					mark = "  revoked"
				}
				_, _ = fmt.Fprintf(w, "%-8s  %s%s\n", k.Role, k.KeyID, mark)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "directory of the hub's data")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}
