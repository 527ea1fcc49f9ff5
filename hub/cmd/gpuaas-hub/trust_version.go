package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/hub/internal/trust"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

func newTrustMinVersion() *cobra.Command {
	var (
		f            rootFlags
		app, version string
		lift         bool
	)
	cmd := &cobra.Command{
		Use:   "min-version",
		Short: "Set the lowest version of an app that may start (offline, with the root key)",
		Long: `Signs the next trust bundle with the lowest acceptable version of an app, for instance after a
fault was found in older ones. Hub and nodes start nothing older from then on, so that a thief of
the hub's online keys cannot either; what runs goes on until it stops or is upgraded.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if lift == (version != "") {
				return fault.New(fault.Malformed, fault.CodeFlagInvalid, "Give --version, or --any to let every version start "+
					"again.", nil)
			}
			root, err := f.keys()
			if err != nil {
				return err
			}
			bundle, err := f.signNext(root, trust.NextBundle{
				MinVersion: &protocol.MinVersion{AppSlug: app, Version: version},
			})
			if err != nil {
				return err
			}
			if err := showBundle(cmd.OutOrStdout(), bundle); err != nil {
				return err
			}
			text := fmt.Sprintf("Versions of %s older than %s do not start any more.\n", app, version)
			if lift {
				text = fmt.Sprintf("Every version of %s may start.\n", app)
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), text)
			return err
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&app, "app", "", "slug of the app")
	cmd.Flags().StringVar(&version, "version", "", "the lowest version that may start")
	cmd.Flags().BoolVar(&lift, "any", false, "let every version start")
	_ = cmd.MarkFlagRequired("app")
	return cmd
}
