// Package query holds the reads of the API: each method checks that the caller may read, and returns what the slices
// store. It changes nothing (command does) and knows nothing of HTTP.
package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/etag"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/protocol"
)

// Service answers the reads of the API, one method each.
type Service struct {
	DB *db.DB
	// Registry may be nil: then it has no host, and holds nothing of any org.
	Registry *artifact.Registry
	// Generations returns the newest generation made for each node; a node without one is left out.
	Generations func(ctx context.Context, tx db.Tx, nodeIDs ...string) (map[string]uint64, error)

	// Tail has the newest events, for those who follow them.
	Tail *event.Tail

	// ImagePull returns how far a node is with the image of a member, nil where it pulls none; it may be nil.
	ImagePull func(nodeID, memberID string) *protocol.ImagePull

	// Cache may be nil: then each read of an app instance reads all of it.
	Cache *InstanceCache

	// pollInterval is the constant of this name where it is zero.
	pollInterval time.Duration
}

// read reads for a caller over one snapshot: check and fn share it.
func read[G, T any](ctx context.Context, s *Service, check access.Check[G],
	fn func(tx db.Tx, granted G) (T, error),
) (T, error) {
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) (T, error) {
		granted, err := check(ctx, tx)
		if err != nil {
			var none T
			return none, err
		}
		return fn(tx, granted)
	})
}

// list returns, to a caller who passes the check, what a slice lists for a filter.
func list[G, F, T any](ctx context.Context, s *Service, check access.Check[G],
	from func(ctx context.Context, tx db.Tx, f F) ([]T, error), f F,
) ([]T, error) {
	return read(ctx, s, check, func(tx db.Tx, _ G) ([]T, error) { return from(ctx, tx, f) })
}

// listIn is list for a page of what belongs to one org, project or user.
func listIn[G, T any](ctx context.Context, s *Service, check access.Check[G],
	from func(ctx context.Context, tx db.Tx, ownerID string, page db.Page) ([]T, error), ownerID string, page db.Page,
) ([]T, error) {
	return read(ctx, s, check, func(tx db.Tx, _ G) ([]T, error) { return from(ctx, tx, ownerID, page) })
}

// itself is for reads that return what the check has read.
func itself[T any](_ db.Tx, granted T) (T, error) { return granted, nil }

// ETag reads the ETag of a resource, empty for none, for a caller whose access is checked before it gets to know it.
func (s *Service) ETag(ctx context.Context, r etag.Resource) (string, error) {
	return db.Query(ctx, s.DB, func(tx db.Tx) (string, error) { return etag.Of(ctx, tx, r) })
}
