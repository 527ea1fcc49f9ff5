package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/protocol"
)

// Node is a node with its facts, the newest generation made for it, and what it refused last.
type Node struct {
	fleet.Node
	Generation uint64
	Refusals   []fleet.Refusal
	// Accelerators has the missing ones too.
	Accelerators []*protocol.Accelerator
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
	return read(ctx, s, access.Platform(p, iam.NodeRead), func(tx db.Tx, _ access.Nothing) ([]Node, error) {
		var found []fleet.Node
		for after := f.After; ; {
			page, err := fleet.List(ctx, tx, after, nodePage)
			if err != nil {
				return nil, err
			}
			for _, n := range page {
				if len(found) < f.Limit && (f.Status == "" || string(n.Status(f.Now)) == f.Status) {
					found = append(found, n)
				}
			}
			if len(page) < nodePage || len(found) == f.Limit {
				return s.withFacts(ctx, tx, found...)
			}
			after = page[len(page)-1].ID
		}
	})
}

// Node reads one node.
func (s *Service) Node(ctx context.Context, p iam.Principal, id string, w Watch) (Node, error) {
	return await(ctx, s, id, w, func() (Node, int64, error) {
		n, err := s.readNode(ctx, p, id)
		return n, n.ResourceVersion, err
	})
}

// readNode reads a node in one round trip. What is stored beside its row may be newer than its version.
func (s *Service) readNode(ctx context.Context, p iam.Principal, id string) (Node, error) {
	if err := iam.Authorize(p, iam.NodeRead, "", ""); err != nil {
		return Node{}, err
	}
	return db.Query(ctx, s.DB, func(tx db.Tx) (Node, error) {
		var (
			n      fleet.Node
			beside []Node
		)
		err := db.Together(ctx, tx, func(tx db.Tx) (err error) {
			n, err = fleet.Get(ctx, tx, id)
			return err
		}, func(tx db.Tx) (err error) {
			if db.IsID(id) {
				beside, err = s.withFacts(ctx, tx, fleet.Node{ID: id})
			}
			return err
		})
		if err != nil {
			return Node{}, err
		}
		out := beside[0]
		n.Facts = out.Facts
		out.Node = n
		return out, nil
	})
}

// withFacts adds what is stored beside the rows of nodes, one statement for each kind, all in one round trip.
func (s *Service) withFacts(ctx context.Context, tx db.Tx, nodes ...fleet.Node) ([]Node, error) {
	ids, out := make([]string, len(nodes)), make([]Node, len(nodes))
	facts := make([]*fleet.Node, len(nodes))
	for i, n := range nodes {
		ids[i], out[i].Node, facts[i] = n.ID, n, &out[i].Node
	}
	err := db.Together(ctx, tx, func(tx db.Tx) error {
		return fleet.LoadFacts(ctx, tx, facts...)
	}, func(tx db.Tx) error {
		generations, err := s.Generations(ctx, tx, ids...)
		for i, id := range ids {
			out[i].Generation = generations[id]
		}
		return err
	}, func(tx db.Tx) error {
		accelerators, err := capacity.Accelerators(ctx, tx, ids...)
		for i, id := range ids {
			out[i].Accelerators = accelerators[id]
		}
		return err
	}, func(tx db.Tx) error {
		refusals, err := fleet.Refusals(ctx, tx, ids...)
		for i, id := range ids {
			out[i].Refusals = refusals[id]
		}
		return err
	})
	return out, err
}

// JoinTokens lists join tokens without their secrets.
func (s *Service) JoinTokens(ctx context.Context, p iam.Principal, page db.Page) ([]fleet.JoinToken, error) {
	return list(ctx, s, access.Platform(p, iam.JoinTokenRead), fleet.ListTokens, page)
}
