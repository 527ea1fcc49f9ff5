package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const outputJSON = "json"

func newInit() *cobra.Command {
	var (
		dataDir, keyDir, trustDomain, output string
		guard                                newPassphraseFlags
		tlsNames                             []string
		lifetime                             time.Duration
	)
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Make the keys of a new hub",
		Long: `Makes all keys of a new hub and its first trust bundle. Root and catalog key are written,
encrypted with a passphrase, to the key directory, which must lie outside the data directory: move
it to a safe place afterwards. Without the root key no key can be revoked; without the catalog key
no publisher can be added.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if keyDir == "" {
				keyDir = strings.TrimRight(dataDir, "/") + "-keys"
			}
			passphrase, err := guard.read(func() (string, error) { return readPassphrase("", true) })
			if err != nil {
				return err
			}
			hostname, err := os.Hostname()
			if err != nil {
				return err
			}
			result, err := trust.Init(trust.InitOptions{
				DataDir: dataDir, OfflineDir: keyDir, TrustDomain: trustDomain, Passphrase: passphrase, Now: time.Now(),
				BundleTTL:   lifetime,
				ServerNames: tlsNames, Hostname: hostname,
			})
			if err != nil {
				return err
			}
			if output == outputJSON {
				made := map[string]string{
					"root_fingerprint": result.RootFingerprint, "trust_domain": trustDomain, "hub_id": result.HubID,
					"root_key_file": result.RootKeyFile, "catalog_key_file": result.CatalogKeyFile, "ca_file": result.CAFile,
				}
				if guard.generate {
					made["passphrase"] = passphrase
				}
				return json.NewEncoder(cmd.OutOrStdout()).Encode(made)
			}
			if err := guard.show(cmd.OutOrStdout(), passphrase); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), `The hub's keys are made.

  root fingerprint   %s
  offline keys       %s (encrypted; move them to a safe place, two copies)
  clients verify by  %s

Start the hub:  gpuaas-hub serve --data-dir %s
`, result.RootFingerprint, keyDir, result.CAFile, dataDir)
			return err
		},
	}
	cmd.Flags().StringVar(&dataDir, "data-dir", defaultDataDir, "directory of the hub's data")
	cmd.Flags().StringVar(&keyDir, "key-dir", "", "directory for the root and catalog keys, outside the data directory "+
		"(default: <data-dir>-keys)")
	guard.add(cmd, "passphrase-file", "file with the passphrase for these keys, 16 bytes or more (default: asked on the "+
		"terminal)")
	cmd.Flags().StringSliceVar(&tlsNames, "tls-name", nil,
		"DNS name or IP address under which clients reach the hub (repeatable): its authority may vouch for no others but "+
			"localhost and this machine's name "+
			"(default: names below the trust domain and private addresses)")
	bundleLifetimeFlag(cmd, &lifetime)
	cmd.Flags().StringVar(&trustDomain, "trust-domain", "gpuaas.internal", "name of the mesh in all certificates; it "+
		"never changes")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	return cmd
}

// readPassphrase reads the first line of the file, or asks. repeat asks twice, for a new passphrase.
func readPassphrase(file string, repeat bool) (string, error) {
	return readPassphraseFor("Passphrase for the offline keys: ", file, repeat)
}

// readPassphraseFor is readPassphrase with another question.
func readPassphraseFor(prompt, file string, repeat bool) (string, error) {
	if file != "" {
		data, err := os.ReadFile(file)
		if err != nil {
			return "", fault.New(fault.Malformed, codePassphraseFileUnreadable, "The passphrase file "+file+" cannot be read.",
				err)
		}
		line, _, _ := strings.Cut(string(data), "\n")
		return strings.TrimRight(line, "\r"), nil
	}
	stdin := int(os.Stdin.Fd())
	if !term.IsTerminal(stdin) {
		return "", fault.New(fault.Malformed, codePassphraseMissing, "Give the passphrase with --passphrase-file, or run "+
			"this on a terminal.", nil)
	}
	return askPassphrase(prompt, stdin, repeat)
}

func askPassphrase(prompt string, stdin int, repeat bool) (string, error) {
	ask := func(prompt string) (string, error) {
		_, _ = io.WriteString(os.Stderr, prompt)
		text, err := term.ReadPassword(stdin)
		_, _ = io.WriteString(os.Stderr, "\n")
		return string(text), err
	}
	first, err := ask(prompt)
	if err != nil || !repeat {
		return first, err
	}
	second, err := ask("The same again: ")
	if err != nil {
		return "", err
	}
	if first != second {
		return "", fault.New(fault.Malformed, codePassphrasesDiffer, "The two passphrases differ; nothing was made.", nil)
	}
	return first, nil
}
