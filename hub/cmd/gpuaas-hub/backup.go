package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/hub/internal/backup"
	"github.com/gpuaas/gpuaas/hub/internal/backuprecord"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/recovery"
	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func newBackup() *cobra.Command {
	var (
		c               config
		guard           newPassphraseFlags
		withoutRegistry bool
	)
	cmd := &cobra.Command{
		Use:   "backup FILE",
		Short: "Write everything of the hub but the offline keys to one encrypted file; the hub may run",
		Long: `Writes one consistent snapshot of the database, the online keys and trust bundles, the
key-encryption key, the admin token's file and the registry to FILE, encrypted with a passphrase
(age), mode 0600. FILE must not exist. It is read back before it gets its name; from the first such
backup on, nodes keep their usage until it is in one. Root and catalog key are not in it: keep them
apart.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			path, err := backupPath(args[0], c.dataDir)
			if err != nil {
				return err
			}
			passphrase, err := guard.read(func() (string, error) {
				return readPassphraseFor("Passphrase for the backup: ", "", true)
			})
			if err != nil {
				return err
			}
			if err := guard.show(cmd.OutOrStdout(), passphrase); err != nil {
				return err
			}
			var closers closers
			defer func() { err = errors.Join(err, closers.close()) }()
			made, err := makeBackup(cmd.Context(), c, path, backup.Source{
				WithoutRegistry: withoutRegistry, Passphrase: passphrase, ScryptWorkFactor: guard.workFactor(),
			}, closers.add)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "Backup %s of %s is in %s (%d bytes, read back and whole).\n", made.ID,
				made.TakenAt.Format(time.RFC3339), path, made.SizeBytes)
			return err
		},
	}
	c.databaseFlags(cmd)
	guard.add(cmd, "passphrase-file", "file with the passphrase for the backup, 16 bytes or more (default: asked on the "+
		"terminal)")
	cmd.Flags().StringVar(&c.registryDir, "registry-dir", "", "directory of the registry's content, as given to serve "+
		"(default: registry below --data-dir)")
	cmd.Flags().BoolVar(&withoutRegistry, "without-registry", false, "leave the registry's content out, because it is "+
		"kept elsewhere")
	return cmd
}

// backupPath refuses a file below the data directory: both would be lost together.
func backupPath(file, dataDir string) (string, error) {
	path, err := filepath.Abs(file)
	if err != nil {
		return "", err
	}
	dir, err := filepath.Abs(dataDir)
	if err != nil {
		return "", err
	}
	if rel, err := filepath.Rel(dir, path); err == nil && filepath.IsLocal(rel) {
		return "", fault.New(fault.Malformed, codeBackupInDataDir, "The backup must not lie in the data directory "+dataDir+
			": both would be lost together.", nil)
	}
	return path, nil
}

// makeBackup writes a backup to path. The caller sets what a command line chooses of the source, makeBackup the rest.
func makeBackup(ctx context.Context, c config, path string, source backup.Source, onClose func(func() error),
) (backup.Made, error) {
	keys, err := trust.Open(c.dataDir)
	if err != nil {
		return backup.Made{}, err
	}
	d, err := openLocalDatabase(ctx, c, onClose)
	if err != nil {
		return backup.Made{}, err
	}
	id, now := db.NewID(), time.Now().UTC().Truncate(time.Microsecond)
	if err := db.WriteTx(ctx, d, func(tx db.Tx) error { return backuprecord.Plan(ctx, tx, id, now) }); err != nil {
		return backup.Made{}, err
	}
	var ends []ledger.ChainEnd
	source.ID, source.DB, source.DataDir, source.RegistryDir = id, d, c.dataDir, c.registryDir
	source.HubID, source.Release, source.Now = keys.HubID(), daemon.Version(), time.Now()
	source.InSnapshot = func(ctx context.Context, tx db.Tx) (err error) {
		ends, err = ledger.ChainEnds(ctx, tx)
		return err
	}
	made, err := backup.Make(ctx, source, path)
	if err != nil {
		return backup.Made{}, err
	}
	return made, recovery.RecordBackup(ctx, d, backuprecord.Record{
		ID: made.ID, TakenAt: made.TakenAt, SizeBytes: made.SizeBytes, At: time.Now().UTC().Truncate(time.Microsecond),
	}, func(ctx context.Context, tx db.Tx) error { return ledger.SetArchived(ctx, tx, ends) })
}

// restoreFlags are what `restore` can be told beside where the hub is to be.
type restoreFlags struct {
	passphraseFile, keyDir            string
	rootKeyFiles, rootPassphraseFiles []string
	lifetime                          time.Duration
	keepEpoch                         bool
}

func newRestore() *cobra.Command {
	var (
		c config
		f restoreFlags
	)
	cmd := &cobra.Command{
		Use:   "restore FILE",
		Short: "Bring a hub back from a backup into an empty data directory (with the root key)",
		Long: `Checks all of FILE, then fills an empty data directory and an empty database from it. With the
root key it begins a new epoch: what was signed before and is still under way can no longer reach a
node, and a hub that goes on from before is refused by them.

The restored hub stops nothing. It compiles nothing for a node until the node has brought what it
was told after the backup; what is not heard of keeps its capacity; what contradicts the restored
data is listed by` + "`gpuaas recovery findings`" +
			`. Usage since the backup
comes again from the nodes.

Without the root key at hand, --keep-epoch restores all the same; make sure then that the old hub never runs ` +
			`again. What was revoked,
banned or ended after the backup (keys, nodes, tokens) counts again: repeat it.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			var closers closers
			defer func() { err = errors.Join(err, closers.close()) }()
			header, bundle, err := restore(cmd.Context(), c, f, args[0], closers.add)
			if err != nil {
				return err
			}
			registry := ""
			if !header.Registry {
				registry = "\nThe registry is not in the backup: put its content into " + filepath.Join(c.dataDir, "registry") +
					" before the start.\n"
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), `The hub is restored from backup %s of %s (epoch %d, trust bundle %d).
%s
Repeat what was revoked, banned or ended after that time: keys, nodes, tokens, service accounts.
Start the hub:    gpuaas-hub serve --data-dir %s
Then look at:     gpuaas recovery waiting; gpuaas recovery findings
`, header.ID, header.TakenAt.Format(time.RFC3339), bundle.epoch, bundle.version, registry, c.dataDir)
			return err
		},
	}
	c.databaseFlags(cmd)
	cmd.Flags().StringVar(&f.passphraseFile, "passphrase-file", "", "file with the passphrase of the backup (default: "+
		"asked on the terminal)")
	cmd.Flags().StringVar(&f.keyDir, "key-dir", "", "directory with the offline keys (default: <data-dir>-keys)")
	cmd.Flags().StringArrayVar(&f.rootKeyFiles, "root-key-file", nil, "a root key; repeat it for as many as must sign "+
		"(default: <key-dir>/"+trust.RootKeyFile+")")
	cmd.Flags().StringArrayVar(&f.rootPassphraseFiles, "root-passphrase-file", nil, "file with the passphrase of the "+
		"root keys; once for all, or once for each (default: asked on the terminal)")
	bundleLifetimeFlag(cmd, &f.lifetime)
	cmd.Flags().BoolVar(&f.keepEpoch, "keep-epoch", false, "begin no new epoch, because the root key is not at hand; "+
		"the old hub must never run again")
	return cmd
}

// restoredBundle is what counts after a restore.
type restoredBundle struct{ epoch, version uint64 }

func restore(ctx context.Context, c config, f restoreFlags, path string,
	onClose func(func() error),
) (backup.Header, restoredBundle, error) {
	var bundle restoredBundle
	passphrase, err := readPassphraseFor("Passphrase of the backup: ", f.passphraseFile, false)
	if err != nil {
		return backup.Header{}, bundle, err
	}
	epoch := trust.EpochOptions{Root: trust.RootKeys{Files: f.rootKeyFiles}, Now: time.Now(), BundleTTL: f.lifetime}
	if !f.keepEpoch {
		if len(epoch.Root.Files) == 0 {
			epoch.Root.Files = []string{filepath.Join(offlineDir(f.keyDir, c.dataDir), trust.RootKeyFile)}
		}
		if epoch.Root.Passphrases, err = readPassphrases(epoch.Root.Files, f.rootPassphraseFiles); err != nil {
			return backup.Header{}, bundle, err
		}
		// Before anything is made: a wrong passphrase is a matter of typing it again.
		if err := trust.CheckRoot(epoch.Root); err != nil {
			return backup.Header{}, bundle, err
		}
	}
	header, err := backup.Restore(ctx, backup.Target{
		DataDir: c.dataDir, Passphrase: passphrase,
		CheckTrust: func(trustDir string) error {
			if f.keepEpoch {
				return nil
			}
			epoch.TrustDir = trustDir
			return trust.CheckEpoch(epoch)
		},
		Database: func(ctx context.Context) (*db.DB, error) {
			lock, err := checkDataDir(c.dataDir)
			if err != nil {
				return nil, err
			}
			onClose(lock.Close)
			return connectDatabase(ctx, c, slog.New(slog.DiscardHandler), onClose)
		},
		Finish: func(ctx context.Context, d *db.DB, h backup.Header, trustDir string) (err error) {
			epoch.TrustDir = trustDir
			bundle, err = beginRecovery(ctx, d, h, epoch, f.keepEpoch)
			return err
		},
	}, path)
	return header, bundle, err
}

// beginRecovery migrates the schema, begins the new epoch and marks all nodes as awaiting resync.
func beginRecovery(ctx context.Context, d *db.DB, h backup.Header, o trust.EpochOptions,
	keepEpoch bool,
) (restoredBundle, error) {
	if err := db.Migrate(ctx, d); err != nil {
		return restoredBundle{}, err
	}
	newest, err := trust.Newest(o.TrustDir)
	if err == nil && !keepEpoch {
		newest, err = trust.NewEpoch(o)
	}
	if err != nil {
		return restoredBundle{}, err
	}
	return restoredBundle{newest.Epoch(), newest.Version()}, recovery.Begin(ctx, d, recovery.Restore{
		ID: db.NewID(), BackupID: h.ID, TakenAt: h.TakenAt, Epoch: newest.Epoch(),
		At: time.Now().UTC().Truncate(time.Microsecond),
	})
}
