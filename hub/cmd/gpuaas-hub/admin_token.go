package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func newAdminToken() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "admin-token",
		Short: "Make a new token for the first admin; the old ones no longer count",
		Long: `Makes a new token for the first platform admin, writes it to <data-dir>/admin-token and ends all others of that admin. A hub
with a private database must be stopped first.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			ctx := cmd.Context()
			if c.databaseURLFile == "" {
				lock, err := checkDataDir(c.dataDir)
				if err != nil {
					return err
				}
				defer func() { _ = lock.Close() }()
			}
			var closers []func() error
			defer func() {
				for _, fn := range slices.Backward(closers) {
					err = errors.Join(err, fn())
				}
			}()
			d, err := openDatabase(ctx, c, slog.New(slog.DiscardHandler), func(fn func() error) { closers = append(closers, fn) })
			if err != nil {
				return err
			}
			if _, _, err := withTokenFile(c.tokenFile(), func(token string) (bool, error) {
				return true, (&command.RecoverAdmin{DB: d}).Do(ctx, token, time.Now())
			}); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "The new admin token is in %s.\n", c.tokenFile())
			return err
		},
	}
	cmd.Flags().StringVar(&c.dataDir, "data-dir", defaultDataDir, "directory of the hub's data")
	cmd.Flags().StringVar(&c.databaseURLFile, "database-url-file", "", "file with the URL of the hub's database (default: its private PostgreSQL)")
	cmd.Flags().StringVar(&c.postgresBinDir, "postgres-bin-dir", "", "directory with initdb and postgres (default: looked for)")
	return cmd
}

// withTokenFile keeps a new token beside the file, lets count make it the one that counts, then moves it into place. A token
// that a crash left beside the file is taken again: it may count already.
func withTokenFile(path string, count func(token string) (bool, error)) (token string, made bool, err error) {
	failed := func(err error) error {
		return fault.New(fault.Internal, "token_file_unwritable", "The admin token cannot be written to "+path+": check free space and permissions.", err)
	}
	next := path + ".new"
	left, err := os.ReadFile(next)
	interrupted := err == nil && len(left) > 0
	if interrupted {
		token = strings.TrimSpace(string(left))
	} else {
		token = iam.NewUserToken()
		if err := writePrivate(next, token+"\n"); err != nil {
			return "", false, failed(err)
		}
	}
	if made, err = count(token); err != nil {
		return "", false, err
	}
	if _, err := os.Lstat(path); !made && (!interrupted || err == nil) {
		return "", false, os.Remove(next)
	}
	if err := os.Rename(next, path); err != nil {
		return token, made, failed(err)
	}
	return token, made, nil
}

func writePrivate(path, text string) error {
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Sync(), f.Close())
}
