package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const outputJSON = "json"

// initFlags are those of `init`.
type initFlags struct {
	trust.InitOptions
	output string
	guard  newPassphraseFlags
}

func newInit() *cobra.Command {
	var f initFlags
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Make the keys of a new hub",
		Long: `Makes all keys of a new hub and its first trust bundle. Root and catalog key are written,
encrypted with a passphrase, to the key directory, which must lie outside the data directory: move
it to a safe place afterwards. Without the root key no key can be revoked; without the catalog key
no publisher can be added.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.OutOrStdout()) },
	}
	cmd.Flags().StringVar(&f.DataDir, "data-dir", defaultDataDir, "directory of the hub's data")
	cmd.Flags().StringVar(&f.OfflineDir, "key-dir", "", "directory for the root and catalog keys, outside the data "+
		"directory "+
		"(default: <data-dir>-keys)")
	f.guard.add(cmd, "passphrase-file", "file with the passphrase for these keys, 16 bytes or more (default: asked on "+
		"the "+
		"terminal)")
	cmd.Flags().StringSliceVar(&f.ServerNames, "tls-name", nil,
		"DNS name or IP address under which clients reach the hub (repeatable): its authority may vouch for no others but "+
			"localhost and this machine's name "+
			"(default: names below the trust domain and private addresses)")
	bundleLifetimeFlag(cmd, &f.BundleTTL)
	cmd.Flags().StringVar(&f.TrustDomain, "trust-domain", "gpuaas.internal", "name of the mesh in all certificates; it "+
		"never changes")
	daemon.ChoiceVarP(cmd.Flags(), &f.output, "output", "o", "text", []string{"text", outputJSON}, "text or json")
	return cmd
}

func (f *initFlags) run(out io.Writer) (err error) {
	f.OfflineDir = offlineDir(f.OfflineDir, f.DataDir)
	if f.Passphrase, err = f.guard.read(func() (string, error) { return readPassphrase("", true) }); err != nil {
		return err
	}
	if f.Hostname, err = os.Hostname(); err != nil {
		return err
	}
	f.Now, f.ScryptWorkFactor = time.Now(), f.guard.workFactor()
	result, err := trust.Init(f.InitOptions)
	if err != nil {
		return err
	}
	if f.output == outputJSON {
		made := map[string]string{
			"root_fingerprint": result.RootFingerprint, "trust_domain": f.TrustDomain, "hub_id": result.HubID,
			"root_key_file": result.RootKeyFile, "catalog_key_file": result.CatalogKeyFile, "ca_file": result.CAFile,
		}
		if f.guard.generate {
			made["passphrase"] = f.Passphrase
		}
		return json.NewEncoder(out).Encode(made)
	}
	if err := f.guard.show(out, f.Passphrase); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, `The hub's keys are made.

  root fingerprint   %s
  offline keys       %s (encrypted; move them to a safe place, two copies)
  clients verify by  %s

Start the hub:  gpuaas-hub serve --data-dir %s
`, result.RootFingerprint, f.OfflineDir, result.CAFile, f.DataDir)
	return err
}

// offlineDir is the directory of the offline keys: beside the data directory where no flag names another.
func offlineDir(keyDir, dataDir string) string {
	return cmp.Or(keyDir, strings.TrimRight(dataDir, "/")+"-keys")
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
