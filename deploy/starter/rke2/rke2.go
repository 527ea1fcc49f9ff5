// Package rke2 is a reference of an external worker in the shape of RKE2: a server on the member with the role
// controller, an agent on every other, which joins with the server's token. The steps on the cluster are stand-ins
// (standin.sh): no Kubernetes runs. The tasks, phases, members and repetitions are real.
package rke2

import (
	"context"
	_ "embed" // the stand-ins of the steps on a member
	"fmt"
	"slices"

	"github.com/gpuaas/gpuaas/deploy/starter"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/worker"
)

//go:embed standin.sh
var standinScript []byte

// Manifest is the app that Controller operates.
//
//go:embed manifest.yaml
var Manifest []byte

// Dir is where a member keeps the cluster's files.
const Dir = "/srv/rke2"

// Controller operates one cluster.
type Controller struct {
	Machines starter.Machines
}

// Handle does one task; it is the handler of a worker.
func (c *Controller) Handle(ctx context.Context, t worker.Task) error {
	nodes, err := c.Machines.Nodes(t.Instance, standinScript, Dir)
	if err != nil {
		return err
	}
	server, agents := nodes[0], nodes[1:]
	if t.MemberID != "" {
		agents = slices.DeleteFunc(slices.Clone(nodes), func(n starter.Node) bool { return n.ID != t.MemberID })
	}
	switch t.Kind {
	case client.TaskKindDeploy:
		if err := t.Phase(ctx, "server"); err != nil {
			return err
		}
		if _, err := server.Step(ctx, "server"); err != nil {
			return err
		}
		return join(ctx, t, server, agents)
	case client.TaskKindMemberAdd, client.TaskKindMemberRecover:
		return join(ctx, t, server, agents)
	case client.TaskKindMemberRemove:
		return leave(ctx, t, server, agents)
	case client.TaskKindDecommission:
		if err := t.Phase(ctx, "uninstall"); err != nil {
			return err
		}
		slices.Reverse(nodes) // the server goes last
		return starter.Each(ctx, nodes, "uninstall")
	default:
		return fmt.Errorf("the task %s is not in the manifest", t.Kind)
	}
}

// join makes nodes part of the cluster, for the first time or again.
func join(ctx context.Context, t worker.Task, server starter.Node, nodes []starter.Node) error {
	if err := t.Phase(ctx, "agents"); err != nil {
		return err
	}
	token, err := server.Step(ctx, "token")
	if err != nil {
		return err
	}
	for _, n := range nodes {
		verb, args := "agent", []string{server.Address, token}
		if n.ID == server.ID {
			verb, args = "server", nil
		}
		if _, err := n.Step(ctx, verb, args...); err != nil {
			return err
		}
		if _, err := server.Step(ctx, "registered", n.Name); err != nil {
			return err
		}
	}
	if err := t.Phase(ctx, "ready"); err != nil {
		return err
	}
	for _, n := range nodes {
		if _, err := server.Step(ctx, "uncordon", n.Name); err != nil {
			return err
		}
		if err := server.AwaitReady(ctx, []string{"Ready"}, "ready", n.Name); err != nil {
			return err
		}
	}
	return nil
}

// leave moves what runs on nodes to the others, and takes them out of the cluster.
func leave(ctx context.Context, t worker.Task, server starter.Node, nodes []starter.Node) error {
	for _, phase := range []struct{ name, verb string }{{"drain", "drain"}, {"leave", "delete"}} {
		if err := t.Phase(ctx, phase.name); err != nil {
			return err
		}
		for _, n := range nodes {
			if _, err := server.Step(ctx, phase.verb, n.Name); err != nil {
				return err
			}
		}
	}
	return starter.Each(ctx, nodes, "uninstall")
}
