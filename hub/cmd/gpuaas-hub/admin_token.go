package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/durable"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func newAdminToken() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "admin-token",
		Short: "Make a new token for the first admin; the old ones no longer count",
		Long: `Makes a new token for the first platform admin, writes it to <data-dir>/admin-token and ends
all others of that admin. The hub may run or not. It is for an operator who may read the hub's data
directory on its own machine, and is in the audit trail.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			ctx := cmd.Context()
			var closers closers
			defer func() { err = errors.Join(err, closers.close()) }()
			d, err := openLocalDatabase(ctx, c, closers.add)
			if err != nil {
				return err
			}
			if _, _, err := withTokenFile(c.tokenFile(), func(token string) (bool, error) {
				return true, (&command.Service{DB: d}).RecoverAdmin(ctx, token, time.Now())
			}); err != nil {
				return err
			}
			forgotten := time.NewTimer(iam.PrincipalCacheAge)
			defer forgotten.Stop()
			select {
			case <-forgotten.C: // a hub that runs counts the token of before no more
			case <-ctx.Done():
				return ctx.Err()
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "The new admin token is in %s.\n", c.tokenFile())
			return err
		},
	}
	c.databaseFlags(cmd)
	return cmd
}

// withTokenFile keeps a new token beside the file, lets count make it the one that counts, then moves it into place. A
// token that a crash left beside the file is taken again: it may count already.
func withTokenFile(path string, count func(token string) (bool, error)) (token string, made bool, err error) {
	failed := func(err error) error {
		return fault.New(fault.Internal, codeTokenFileUnwritable, "The admin token cannot be written to "+path+
			": check free space and permissions.", err)
	}
	next := path + ".new"
	left, err := os.ReadFile(next)
	interrupted := err == nil && len(left) > 0
	if interrupted {
		token = strings.TrimSpace(string(left))
	} else {
		token = iam.NewUserToken()
		if err := durable.ReplaceOwned(next, []byte(token+"\n"), 0o600); err != nil {
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
