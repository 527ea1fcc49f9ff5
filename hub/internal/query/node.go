package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
)

// Node is a node with its facts, the newest generation made for it, and what it refused last.
type Node struct {
	fleet.Node
	Generation uint64
	Refusals   []fleet.Refusal
}

// NodeFilter asks for a page of nodes; an empty status is any.
type NodeFilter struct {
	Status, After string
	Limit         int
	Now           time.Time
}

// nodePage is how many nodes are read at once.
const nodePage = 200

// Nodes lists the nodes of the mesh that have the status.
func (s *Service) Nodes(ctx context.Context, p iam.Principal, f NodeFilter) ([]Node, error) {
	return read(ctx, s, access.Platform(p, iam.NodeRead), func(tx db.Tx, _ access.Nothing) (out []Node, err error) {
		for after := f.After; ; {
			page, err := fleet.List(ctx, tx, after, nodePage)
			if err != nil {
				return nil, err
			}
			for _, n := range page {
				if f.Status != "" && string(n.Status(f.Now)) != f.Status {
					continue
				}
				node, err := s.withFacts(ctx, tx, n)
				if err != nil {
					return nil, err
				}
				if out = append(out, node); len(out) == f.Limit {
					return out, nil
				}
			}
			if len(page) < nodePage {
				return out, nil
			}
			after = page[len(page)-1].ID
		}
	})
}

// Node reads one node.
func (s *Service) Node(ctx context.Context, p iam.Principal, id string, w Watch) (Node, error) {
	return await(ctx, s, id, w, func() (Node, int64, error) {
		n, err := read(ctx, s, access.Platform(p, iam.NodeRead), func(tx db.Tx, _ access.Nothing) (Node, error) {
			n, err := fleet.Get(ctx, tx, id)
			if err != nil {
				return Node{}, err
			}
			return s.withFacts(ctx, tx, n)
		})
		return n, n.ResourceVersion, err
	})
}

func (s *Service) withFacts(ctx context.Context, tx db.Tx, n fleet.Node) (out Node, err error) {
	if err := fleet.LoadFacts(ctx, tx, &n); err != nil {
		return Node{}, err
	}
	out.Node = n
	if out.Generation, err = s.Generation(ctx, tx, n.ID); err != nil {
		return Node{}, err
	}
	out.Refusals, err = fleet.Refusals(ctx, tx, n.ID, fleet.MaxRefusals)
	return out, err
}

// JoinTokens lists join tokens without their secrets.
func (s *Service) JoinTokens(ctx context.Context, p iam.Principal, after string, limit int) ([]fleet.JoinToken, error) {
	return read(ctx, s, access.Platform(p, iam.JoinTokenRead),
		func(tx db.Tx, _ access.Nothing) ([]fleet.JoinToken, error) {
			return fleet.ListTokens(ctx, tx, after, limit)
		})
}
