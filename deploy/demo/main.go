// Command demo starts a hub and a node on this machine, ships an app to them, runs, meters and bills it; `make demo`
// and `make demo-down` call it. It uses only the programs and the public API.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	c := defaults()
	root := &cobra.Command{Use: "demo", SilenceUsage: true, SilenceErrors: true}
	root.PersistentFlags().StringVar(&c.Dir, "dir", c.Dir, "where the demo lives; not below /root, where PostgreSQL "+
		"cannot work")
	root.PersistentFlags().StringVar(&c.RunDir, "run-dir", c.RunDir, "on a file system that a reboot empties")
	up := &cobra.Command{
		Use: "up", Short: "take an earlier demo down and start a new one", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := down(cmd.Context(), c.Dir); err != nil {
				return fmt.Errorf("the earlier demo could not be taken down: %w", err)
			}
			return up(cmd.Context(), c)
		},
	}
	up.Flags().StringVar(&c.Bin, "bin", c.Bin, "directory of the programs")
	up.Flags().StringVar(&c.Source, "source", c.Source, "root of the source tree, for the app to build")
	up.Flags().StringVar(&c.App, "app", c.App, "demo, jupyter or vllm")
	up.Flags().StringVar(&c.Listen, "listen", c.Listen, "address of the hub's API (TCP) and sessions (UDP)")
	up.Flags().StringVar(&c.Bridge, "bridge", c.Bridge, "name of the containers' bridge")
	up.Flags().StringVar(&c.PodCIDR, "pod-cidr", c.PodCIDR, "network of the containers")
	up.Flags().StringVar(&c.PortRange, "port-range", c.PortRange, "ports of 127.0.0.1 for endpoints")
	up.Flags().StringVar(&c.Containerd, "containerd-address", c.Containerd, "socket of the machine's containerd; where "+
		"none serves the demo starts its own")
	root.AddCommand(up, &cobra.Command{
		Use: "down", Short: "remove everything that the demo made", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return down(cmd.Context(), c.Dir)
		},
	})
	return root
}
