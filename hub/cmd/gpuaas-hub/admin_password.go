package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

func newAdminPassword() *cobra.Command {
	var c config
	var file string
	cmd := &cobra.Command{
		Use:   "admin-password",
		Short: "Set the password by which the first admin logs in",
		Long: `Sets the password of the first platform admin, so that ` + "`gpuaas login --email`" + ` works, and ends that
admin's other logins and one-time codes; tokens stay. The password is asked for twice, or is the
first line of a file. The hub may run or not. It is for an operator who may read the hub's data
directory on its own machine, and is in the audit trail.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			password, err := readPassphraseFor("Password of the first admin: ", file, true)
			if err != nil {
				return err
			}
			if err := iam.CheckPassword(password); err != nil {
				return fault.New(fault.Malformed, fault.CodeInvalid, "The password must have 12 to 256 characters; nothing was "+
					"changed.", err)
			}
			ctx := cmd.Context()
			var closers closers
			defer func() { err = errors.Join(err, closers.close()) }()
			d, err := openLocalDatabase(ctx, c, closers.add)
			if err != nil {
				return err
			}
			admin, err := (&command.Service{DB: d}).SetAdminPassword(ctx, password, time.Now())
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "The password of %s is set. Set up one-time codes after the login: gpuaas "+
				"password --one-time-codes\n", admin.Email)
			return err
		},
	}
	c.databaseFlags(cmd)
	cmd.Flags().StringVar(&file, "password-file", "", "file with the password in its first line (default: asked on the "+
		"terminal)")
	return cmd
}
