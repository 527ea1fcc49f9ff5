package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// recoveryCommand shows what a hub that was restored from a backup waits for, and what it has found.
func (a *app) recoveryCommand() *cobra.Command {
	nodes := []column[client.RecoveringNode]{
		{"NODE", func(n client.RecoveringNode) string { return n.NodeID }},
		{"HOST", func(n client.RecoveringNode) string { return n.Hostname }},
		{"STATE", func(n client.RecoveringNode) string { return string(n.State) }},
	}
	findings := []column[client.RecoveryFinding]{
		{"KIND", func(f client.RecoveryFinding) string { return string(f.Kind) }},
		{"RESOURCE", func(f client.RecoveryFinding) string { return f.ResourceType + " " + f.ResourceID }},
		{"NODE", func(f client.RecoveryFinding) string { return f.NodeID }},
		{"DETAIL", func(f client.RecoveryFinding) string { return f.Detail }},
	}
	read := func(ctx context.Context, s *session) (client.Recovery, error) {
		return client.Read[client.Recovery](s.hub.GetRecovery(ctx, s.editors()...))
	}
	waiting := a.action("waiting", "Nodes that have not contacted a restored hub yet, or whose usage is still to come",
		cobra.NoArgs, func(ctx context.Context, s *session, _ []string) error {
			r, err := read(ctx, s)
			if err != nil {
				return err
			}
			return showList(s, r.Waiting, nodes)
		})
	found := a.action("findings", "What contradicts the restored data, and what the hub could not process and set aside",
		cobra.NoArgs, func(ctx context.Context, s *session, _ []string) error {
			r, err := read(ctx, s)
			if err != nil {
				return err
			}
			return showList(s, r.Findings, findings)
		})
	return group("recovery", "A hub restored from a backup: what it waits for and what it found (platform admin)", waiting,
		found)
}
