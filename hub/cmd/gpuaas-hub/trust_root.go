package main

import (
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// rootFlags say where the root keys are that sign the next trust bundle.
type rootFlags struct {
	dataDir, keyDir        string
	files, passphraseFiles []string
	lifetime               time.Duration
}

func (f *rootFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.dataDir, "data-dir", defaultDataDir, "directory of the hub's data")
	cmd.Flags().StringVar(&f.keyDir, "key-dir", "", "directory with the offline keys (default: <data-dir>-keys)")
	cmd.Flags().StringArrayVar(&f.files, "root-key-file", nil, "a root key; repeat it for as many as must sign "+
		"(default: <key-dir>/"+trust.RootKeyFile+")")
	cmd.Flags().StringArrayVar(&f.passphraseFiles, "passphrase-file", nil, "file with their passphrase; once for all "+
		"keys, or once for each (default: asked on the terminal)")
	bundleLifetimeFlag(cmd, &f.lifetime)
}

func bundleLifetimeFlag(cmd *cobra.Command, lifetime *time.Duration) {
	daemon.DurationVar(cmd.Flags(), lifetime, "bundle-lifetime", trust.DefaultBundleTTL, trust.MinBundleTTL, 0,
		"how long the signed trust bundle is current, 24h or longer; afterwards nodes report trust_bundle_expired")
}

func (f *rootFlags) offlineDir() string { return offlineDir(f.keyDir, f.dataDir) }

// keys reads the passphrases and says which files they open.
func (f *rootFlags) keys() (trust.RootKeys, error) {
	keys := trust.RootKeys{Files: f.files}
	if len(keys.Files) == 0 {
		keys.Files = []string{filepath.Join(f.offlineDir(), trust.RootKeyFile)}
	}
	passphrases, err := readPassphrases(keys.Files, f.passphraseFiles)
	keys.Passphrases = passphrases
	return keys, err
}

// signNext signs the next trust bundle with the root keys.
func (f *rootFlags) signNext(root trust.RootKeys, change trust.NextBundle) (protocol.Bundle, error) {
	change.DataDir, change.Root, change.Now, change.BundleTTL = f.dataDir, root, time.Now(), f.lifetime
	return trust.SignNext(change)
}

// readPassphrases reads them from the files, or asks for that of each key.
func readPassphrases(keyFiles, passphraseFiles []string) (passphrases []string, err error) {
	ask := len(passphraseFiles) == 0
	if ask {
		passphraseFiles = make([]string, len(keyFiles))
	}
	for i, file := range passphraseFiles {
		prompt := ""
		if ask {
			prompt = "Passphrase of " + keyFiles[i] + ": "
		}
		passphrase, err := readPassphraseFor(prompt, file, false)
		if err != nil {
			return nil, err
		}
		passphrases = append(passphrases, passphrase)
	}
	return passphrases, nil
}

// newPassphraseFlags say what guards a file that is made.
type newPassphraseFlags struct {
	file     string
	generate bool
}

func (f *newPassphraseFlags) add(cmd *cobra.Command, fileFlag, what string) {
	cmd.Flags().StringVar(&f.file, fileFlag, "", what)
	cmd.Flags().BoolVar(&f.generate, "generate-passphrase", false, "make the passphrase and print it, once")
}

// read returns the passphrase; otherwise says where it comes from without a file.
func (f *newPassphraseFlags) read(otherwise func() (string, error)) (string, error) {
	switch {
	case f.generate && f.file != "":
		return "", fault.New(fault.Malformed, fault.CodeFlagInvalid, "Give a passphrase file or --generate-passphrase, not "+
			"both.",
			nil)
	case f.generate:
		return trust.NewPassphrase(), nil
	case f.file != "":
		return readPassphrase(f.file, false)
	}
	return otherwise()
}

// workFactor is log2 of the work for one guess of the passphrase; 0 is age's default.
func (f *newPassphraseFlags) workFactor() int {
	if f.generate {
		return trust.NewPassphraseWorkFactor
	}
	return 0
}

// show prints a passphrase that was made, before it guards anything: what comes after may fail.
func (f *newPassphraseFlags) show(w io.Writer, passphrase string) error {
	if !f.generate {
		return nil
	}
	_, err := fmt.Fprintf(w, "Passphrase, shown this once: %s\n", passphrase)
	return err
}

func newTrustRenew() *cobra.Command {
	var f rootFlags
	cmd := &cobra.Command{
		Use:   "renew",
		Short: "Sign the trust bundle again, with a new end (offline, with the root key)",
		Long: `Signs the same keys again as the next trust bundle. Do it before the present one ends (` +
			"`gpuaas-hub trust show`" + `); nothing stops
when it is forgotten, but nodes report trust_bundle_expired. A running hub takes the new bundle over within a ` +
			`resync, or at SIGHUP.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := f.keys()
			if err != nil {
				return err
			}
			bundle, err := f.signNext(root, trust.NextBundle{})
			if err != nil {
				return err
			}
			return showBundle(cmd.OutOrStdout(), bundle)
		},
	}
	f.add(cmd)
	return cmd
}

func showBundle(w io.Writer, bundle protocol.Bundle) error {
	end, _ := bundle.ExpiresAt()
	_, err := fmt.Fprintf(w, "Trust bundle %d is signed and current until %s.\n", bundle.Version(),
		end.UTC().Format(time.RFC3339))
	return err
}

// showRoot says what nodes that join from now on need.
func showRoot(w io.Writer, bundle protocol.Bundle) error {
	if err := showBundle(w, bundle); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "Nodes of this hub follow by themselves. Nodes that join from now on need this root "+
		"fingerprint:\n  %s\n", bundle.Pin())
	return err
}

func newTrustRotateRoot() *cobra.Command {
	var (
		f              rootFlags
		passphrase     newPassphraseFlags
		retire, target string
	)
	cmd := &cobra.Command{
		Use:   "rotate-root",
		Short: "Replace a root key by a new one (offline, with the present root)",
		Long: `Makes a new root key, and signs with the present root and the new key the trust bundle in which
it takes the place of the old one, which is revoked. Where the root is 2-of-3, two present keys
sign, and the third may be the lost one: name it with --retire.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := f.keys()
			if err != nil {
				return err
			}
			secret, err := passphrase.read(func() (string, error) { return root.Passphrases[0], nil })
			if err != nil {
				return err
			}
			file, present := target, filepath.Join(f.offlineDir(), trust.RootKeyFile)
			if target == "" {
				file = present + ".new"
				done, err := trust.Replaced(f.dataDir, protocol.RoleRoot, file, append(root.Passphrases, secret))
				if err != nil {
					return err
				}
				if done {
					return finishRotation(cmd.OutOrStdout(), f.dataDir, present)
				}
			}
			if retire == "" {
				if retire, err = onlyRoot(f.dataDir); err != nil {
					return err
				}
			}
			if err := passphrase.show(cmd.OutOrStdout(), secret); err != nil {
				return err
			}
			bundle, err := f.signNext(root, trust.NextBundle{
				Add: []trust.NewRootKey{{File: file, Passphrase: secret}}, Retire: retire,
				ScryptWorkFactor: passphrase.workFactor(),
			})
			if err != nil {
				return err
			}
			if target == "" {
				if err := moveKey(present, codeRootKeyNotMoved, rootRotated); err != nil {
					return err
				}
			}
			return showRoot(cmd.OutOrStdout(), bundle)
		},
	}
	f.add(cmd)
	passphrase.add(cmd, "new-passphrase-file", "file with the passphrase of the new key (default: that of the first "+
		"root key)")
	cmd.Flags().StringVar(&retire, "retire", "", "id of the root key that is replaced (default: the only one)")
	cmd.Flags().StringVar(&target, "new-root-key-file", "", "where the new key goes (default: it takes the place of "+
		"<key-dir>/"+trust.RootKeyFile+")")
	return cmd
}

const rootRotated = "The root is rotated"

// finishRotation does what is left of a rotation that was cut off.
func finishRotation(out io.Writer, dataDir, present string) error {
	if err := moveKey(present, codeRootKeyNotMoved, rootRotated); err != nil {
		return err
	}
	keys, err := trust.Open(dataDir)
	if err != nil {
		return err
	}
	return showRoot(out, keys.Bundle())
}

// onlyRoot is the id of the root key where there is one.
func onlyRoot(dataDir string) (string, error) {
	keys, err := trust.Open(dataDir)
	if err != nil {
		return "", err
	}
	root := keys.Bundle().Keys(protocol.RoleRoot)
	if len(root) != 1 {
		return "", fault.New(fault.Malformed, fault.CodeFlagInvalid, "There are several root keys: say with --retire which "+
			"one is "+
			"replaced (`gpuaas-hub trust show` lists them).", nil)
	}
	return root[0].GetKeyId(), nil
}

func newTrustAddRoot() *cobra.Command {
	var (
		f          rootFlags
		passphrase newPassphraseFlags
		targets    []string
		threshold  int
	)
	cmd := &cobra.Command{
		Use:   "add-root",
		Short: "Add root keys, so that several must sign, like 2 of 3 (offline, with the present root)",
		Long: `Makes further root keys and signs, with the present root and the new keys, the trust bundle
that lists them. By default two are added to the first one, and two of the three must sign from then
on: one may be lost or stolen. Keep them in different places.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root, err := f.keys()
			if err != nil {
				return err
			}
			secret, err := passphrase.read(func() (string, error) { return root.Passphrases[0], nil })
			if err != nil {
				return err
			}
			if err := passphrase.show(cmd.OutOrStdout(), secret); err != nil {
				return err
			}
			if len(targets) == 0 {
				targets = []string{filepath.Join(f.offlineDir(), "root-2.age"), filepath.Join(f.offlineDir(), "root-3.age")}
			}
			change := trust.NextBundle{Threshold: threshold, ScryptWorkFactor: passphrase.workFactor()}
			for _, file := range targets {
				change.Add = append(change.Add, trust.NewRootKey{File: file, Passphrase: secret})
			}
			bundle, err := f.signNext(root, change)
			if err != nil {
				return err
			}
			return showRoot(cmd.OutOrStdout(), bundle)
		},
	}
	f.add(cmd)
	passphrase.add(cmd, "new-passphrase-file", "file with the passphrase of the new keys (default: that of the first "+
		"root key)")
	cmd.Flags().StringArrayVar(&targets, "new-root-key-file", nil, "where a new key goes (repeatable; default: "+
		"<key-dir>/root-2.age and root-3.age)")
	cmd.Flags().IntVar(&threshold, "threshold", 2, "how many root keys must sign from then on")
	return cmd
}
