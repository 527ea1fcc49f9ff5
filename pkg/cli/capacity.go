package cli

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func allocationColumns() []column[client.Allocation] {
	return []column[client.Allocation]{
		{"ID", func(l client.Allocation) string { return l.ID }},
		{"STATUS", func(l client.Allocation) string { return string(l.Status) }},
		{"NODE", func(l client.Allocation) string { return l.NodeID }},
		{"SHAPE", func(l client.Allocation) string { return string(l.CapacityShape) }},
		{"ACCELERATORS", func(l client.Allocation) string {
			return fmt.Sprintf("%d %s", l.AcceleratorCount, l.AcceleratorModel)
		}},
		{"CPU", func(l client.Allocation) string { return fmt.Sprintf("%d (%s free)", l.CPUCores, l.FreeCPUCores) }},
		{"MEMORY MIB", func(l client.Allocation) string { return fmt.Sprintf("%d (%d free)", l.MemoryMib, l.FreeMemoryMib) }},
		{"CREATED", func(l client.Allocation) string { return stamp(l.CreatedAt) }},
	}
}

func (a *app) allocationsCommand() *cobra.Command {
	var only string
	list := projectListing(a, "list", "Allocations of the project", cobra.NoArgs, allocationColumns(),
		func(ctx context.Context, s *session, project string, _ []string,
			cursor string,
		) (*http.Response, error) {
			return s.hub.ListAllocations(ctx, project, &client.ListAllocationsParams{
				Cursor: cursor, Limit: client.PageSize, Status: client.AllocationStatus(only),
			}, s.editors()...)
		})
	list.Flags().StringVar(&only, "status", "", "only those with this status")
	one := func(verb, short string, call func(ctx context.Context, s *session, project,
		id string) (*http.Response, error),
	) *cobra.Command {
		return a.projectAction(verb+" ALLOCATION_ID", short, cobra.ExactArgs(1), func(ctx context.Context, s *session,
			project string, args []string,
		) error {
			return showAnswer(s, allocationColumns())(call(ctx, s, project, args[0]))
		})
	}
	return group("allocations", "Capacity held by the project", a.createAllocation(), list, a.sshKeysCommand(),
		one("get", "One allocation", func(ctx context.Context, s *session, project, id string) (*http.Response, error) {
			return s.hub.GetAllocation(ctx, project, id, s.editors()...)
		}),
		one("release", "Give capacity back", func(ctx context.Context, s *session, project,
			id string,
		) (*http.Response, error) {
			return s.hub.ReleaseAllocation(ctx, project, id, s.editors()...)
		}))
}

func (a *app) createAllocation() *cobra.Command {
	var (
		body        client.AllocationCreate
		node, shape string
		create      *cobra.Command
	)
	create = a.projectAction("create", "Hold capacity on a node", cobra.NoArgs, func(ctx context.Context, s *session,
		project string, _ []string,
	) (err error) {
		if node != "" {
			if body.NodeID, err = s.nodeID(ctx, node); err != nil {
				return err
			}
		}
		body.CapacityShape = client.CapacityShape(shape)
		if f := create.Flags(); body.Sku != "" && !f.Changed("shape") && !f.Changed("accelerators") && !f.Changed("cpu") &&
			!f.Changed("memory-mib") {
			sku, err := client.Read[client.SKU](s.hub.GetSKU(ctx, body.Sku))
			if err != nil {
				return err
			}
			body.CapacityShape, body.AcceleratorCount, body.CPUCores, body.MemoryMib = sku.CapacityShape, sku.AcceleratorCount,
				sku.CPUCores, sku.MemoryMib
		}
		return showAnswer(s, allocationColumns())(s.hub.CreateAllocation(ctx, project, body, s.editors()...))
	})
	f := create.Flags()
	f.StringVar(&node, "node", "", "node, by id or host name (default: the hub chooses one)")
	f.StringVar(&body.Sku, "sku", "", "SKU, which gives the sizes")
	f.StringVar(&shape, "shape", string(client.CapacityShapeGpuSlice), "gpu_slice or baremetal")
	f.Int32Var(&body.AcceleratorCount, "accelerators", 0, "how many accelerators")
	f.StringVar(&body.AcceleratorModel, "accelerator-model", "", "only accelerators of this model")
	f.Int32Var(&body.CPUCores, "cpu", 1, "CPU cores")
	f.Int64Var(&body.MemoryMib, "memory-mib", 512, "memory in MiB")
	return create
}

func (a *app) skusCommand() *cobra.Command {
	columns := []column[client.SKU]{
		{"SKU", func(k client.SKU) string { return k.Slug }},
		{"SHAPE", func(k client.SKU) string { return string(k.CapacityShape) }},
		{"ACCELERATORS", func(k client.SKU) string {
			return fmt.Sprintf("%d %s", k.AcceleratorCount, k.AcceleratorModel)
		}},
		{"CPU", func(k client.SKU) string { return strconv.Itoa(int(k.CPUCores)) }},
		{"MEMORY MIB", func(k client.SKU) string { return strconv.FormatInt(k.MemoryMib, 10) }},
		{"RETIRED", func(k client.SKU) string { return stamp(k.RetiredAt) }},
	}
	suggested := []column[client.SKUCreate]{
		{"SKU", func(k client.SKUCreate) string { return k.Slug }},
		{"SHAPE", func(k client.SKUCreate) string { return string(k.CapacityShape) }},
		{"ACCELERATORS", func(k client.SKUCreate) string {
			return fmt.Sprintf("%d %s", k.AcceleratorCount, k.AcceleratorModel)
		}},
		{"CPU", func(k client.SKUCreate) string { return strconv.Itoa(int(k.CPUCores)) }},
		{"MEMORY MIB", func(k client.SKUCreate) string { return strconv.FormatInt(k.MemoryMib, 10) }},
	}
	var (
		body  client.SKUCreate
		shape string
	)
	create := a.action("create SKU", "Sell a size of allocations (platform admin)", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, args []string) error {
			body.Slug, body.CapacityShape = args[0], client.CapacityShape(shape)
			return showAnswer(s, columns)(s.hub.CreateSKU(ctx, body, s.editors()...))
		})
	f := create.Flags()
	f.StringVar(&shape, "shape", string(client.CapacityShapeGpuSlice), "gpu_slice or baremetal")
	f.Int32Var(&body.AcceleratorCount, "accelerators", 0, "how many accelerators")
	f.StringVar(&body.AcceleratorModel, "accelerator-model", "", "their model, as nodes report it")
	f.Int32Var(&body.CPUCores, "cpu", 1, "CPU cores")
	f.Int64Var(&body.MemoryMib, "memory-mib", 512, "memory in MiB")
	return group("skus", "Named sizes of allocations", create,
		a.action("retire SKU", "End the sale of a size; allocations stay (platform admin)", cobra.ExactArgs(1),
			func(ctx context.Context, s *session, args []string) error {
				return showAnswer(s, columns)(s.hub.RetireSKU(ctx, args[0], s.editors()...))
			}),
		listing(a, "suggest", "Sizes for accelerators that no SKU sells yet (platform admin)", cobra.NoArgs, suggested,
			func(ctx context.Context, s *session, _ []string, _ string) (*http.Response, error) {
				return s.hub.SuggestSKUs(ctx, s.editors()...)
			}),
		listing(a, "list", "SKUs", cobra.NoArgs, columns, func(ctx context.Context, s *session, _ []string,
			cursor string,
		) (*http.Response, error) {
			return s.hub.ListSKUs(ctx, &client.ListSKUsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		}))
}

func (a *app) nodesCommand() *cobra.Command {
	columns := []column[client.Node]{
		{"HOST", func(n client.Node) string { return n.Hostname }},
		{"STATUS", func(n client.Node) string { return string(n.Status) }},
		{"CPU", func(n client.Node) string { return strconv.Itoa(int(n.CPUCores)) }},
		{"MEMORY MIB", func(n client.Node) string { return strconv.FormatInt(n.MemoryMib, 10) }},
		{"ACCELERATORS", func(n client.Node) string { return strconv.Itoa(len(n.Accelerators)) }},
		{"AGENT", func(n client.Node) string { return n.AgentVersion }},
		{"LAST SEEN", func(n client.Node) string { return stamp(n.LastSeenAt) }},
		{"REFUSED", func(n client.Node) string { return n.LastRefusal.Reason }},
		{"CONDITIONS", func(n client.Node) string { return joined(n.Conditions) }},
		{"ID", func(n client.Node) string { return n.ID }},
	}
	one := func(verb, short string, call func(ctx context.Context, s *session,
		id string) (*http.Response, error),
	) *cobra.Command {
		return a.action(verb+" NODE", short, cobra.ExactArgs(1), func(ctx context.Context, s *session, args []string) error {
			id, err := s.nodeID(ctx, args[0])
			if err != nil {
				return err
			}
			return showAnswer(s, columns)(call(ctx, s, id))
		})
	}
	var status, reason string
	list := listing(a, "list", "Nodes of the mesh", cobra.NoArgs, columns, func(ctx context.Context, s *session,
		_ []string, cursor string,
	) (*http.Response, error) {
		return s.hub.ListNodes(ctx, &client.ListNodesParams{
			Cursor: cursor,
			Limit:  client.PageSize, Status: client.NodeStatus(status),
		}, s.editors()...)
	})
	list.Flags().StringVar(&status, "status", "", "only those with this status")
	ban := one("ban", "Shut a compromised node out for good", func(ctx context.Context, s *session,
		id string,
	) (*http.Response, error) {
		return s.hub.BanNode(ctx, id, client.NodeBan{Reason: reason}, s.editors()...)
	})
	ban.Flags().StringVar(&reason, "reason", "", "why (required)")
	var removal client.NodeRemove
	remove := one("remove", "Take a drained, empty node out of the mesh for good, or one that is lost",
		func(ctx context.Context, s *session, id string) (*http.Response, error) {
			return s.hub.RemoveNode(ctx, id, removal, s.editors()...)
		})
	remove.Flags().BoolVar(&removal.Lost, "lost", false, "the node is gone for good: what it ran ends as node_lost")
	remove.Flags().StringVar(&removal.Reason, "reason", "", "why")
	return group("nodes", "Nodes of the mesh (platform admin)", list, ban, remove, a.getNodeCommand(columns),
		one("release", "Let a quarantined node go on, once one machine only has its key", func(ctx context.Context,
			s *session, id string,
		) (*http.Response, error) {
			return s.hub.ReleaseNode(ctx, id, s.editors()...)
		}),
		one("drain", "Place nothing new on a node", func(ctx context.Context, s *session, id string) (*http.Response, error) {
			return s.hub.DrainNode(ctx, id, s.editors()...)
		}),
		one("undrain", "Place new things on a node again", func(ctx context.Context, s *session,
			id string,
		) (*http.Response, error) {
			return s.hub.UndrainNode(ctx, id, s.editors()...)
		}))
}

func (a *app) getNodeCommand(columns []column[client.Node]) *cobra.Command {
	return a.action("get NODE", "One node, with its accelerators", cobra.ExactArgs(1), func(ctx context.Context,
		s *session, args []string,
	) error {
		id, err := s.nodeID(ctx, args[0])
		if err != nil {
			return err
		}
		n, err := client.Read[client.Node](s.hub.GetNode(ctx, id, s.editors()...))
		if err != nil {
			return err
		}
		return showNode(s, n, columns)
	})
}

// showNode writes a node, and below its table one of its accelerators.
func showNode(s *session, n client.Node, columns []column[client.Node]) error {
	if err := show(s, n, columns); err != nil || s.output != "table" || len(n.Accelerators) == 0 {
		return err
	}
	fmt.Fprintln(s.env.Stdout)
	return table(s.env.Stdout, n.Accelerators, []column[client.NodeAccelerator]{
		{"ACCELERATOR", func(g client.NodeAccelerator) string { return g.ID }},
		{"MODEL", func(g client.NodeAccelerator) string { return g.Model }},
		{"MEMORY MIB", func(g client.NodeAccelerator) string { return strconv.FormatInt(g.MemoryMib, 10) }},
		{"HEALTH", func(g client.NodeAccelerator) string { return g.Health }},
		{"CAUSE", func(g client.NodeAccelerator) string { return g.HealthReason }},
		{"PCI ADDRESS", func(g client.NodeAccelerator) string { return g.PciAddress }},
		{"NUMA", func(g client.NodeAccelerator) string {
			if g.NumaNode < 0 {
				return ""
			}
			return strconv.FormatInt(g.NumaNode, 10)
		}},
		{"DRIVER", func(g client.NodeAccelerator) string { return g.DriverVersion }},
		{"RUNTIME", func(g client.NodeAccelerator) string { return g.RuntimeVersion }},
		{"LINKS", func(g client.NodeAccelerator) string {
			var links []string
			for _, l := range g.Links {
				links = append(links, strings.TrimSpace(fmt.Sprintf("%d %s %s", l.Count, l.Kind, l.PeerID)))
			}
			return strings.Join(links, ", ")
		}},
		{"PARTITIONS", func(g client.NodeAccelerator) string {
			var parts []string
			for _, p := range g.Partitions {
				parts = append(parts, p.Profile+" "+p.ID)
			}
			return strings.Join(parts, ", ")
		}},
	})
}

func (a *app) joinTokensCommand() *cobra.Command {
	columns := []column[client.JoinToken]{
		{"ID", func(t client.JoinToken) string { return t.ID }},
		{"STATUS", func(t client.JoinToken) string { return string(t.Status) }},
		{"DESCRIPTION", func(t client.JoinToken) string { return t.Description }},
		{"NODE", func(t client.JoinToken) string { return t.NodeID }},
		{"EXPIRES", func(t client.JoinToken) string { return stamp(t.ExpiresAt) }},
	}
	var description, save string
	create := a.action("create", "Make a one-time join token; it is shown once", cobra.NoArgs, func(ctx context.Context,
		s *session, _ []string,
	) error {
		t, err := client.Read[client.JoinToken](s.hub.CreateJoinToken(ctx, client.JoinTokenCreate{Description: description},
			s.editors()...))
		if err != nil {
			return err
		}
		shown := append([]column[client.JoinToken]{
			{"TOKEN", func(t client.JoinToken) string { return t.Token }},
			{"ROOT FINGERPRINT", func(t client.JoinToken) string { return t.RootFingerprint }},
		}, columns...)
		if save != "" {
			if err := writePrivate(save, []byte(t.Token+"\n")); err != nil {
				return err
			}
			t.Token, shown = "", shown[1:]
		}
		return show(s, t, shown)
	})
	create.Flags().StringVar(&description, "description", "", "which node it is for")
	create.Flags().StringVar(&save, "save", "", "write the token to this file (mode 0600) instead of showing it")
	return group("join-tokens", "Tokens with which nodes join (platform admin)", create,
		listing(a, "list", "Join tokens", cobra.NoArgs, columns, func(ctx context.Context, s *session, _ []string,
			cursor string,
		) (*http.Response, error) {
			return s.hub.ListJoinTokens(ctx,
				&client.ListJoinTokensParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		}))
}
