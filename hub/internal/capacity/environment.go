package capacity

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"regexp"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/requirement"
	"github.com/gpuaas/gpuaas/protocol"
)

// maxImageBytes bounds the reference of an image that a node reports.
const maxImageBytes = 400

// Environment is Python packages that a node keeps for a project.
type Environment struct {
	NodeID string
	*protocol.InstalledEnvironment
}

// Cursor names the environment in a listing.
func (e Environment) Cursor() string { return e.GetDigest() + "." + e.NodeID }

// environmentKey identifies an environment on a node.
type environmentKey struct{ projectID, digest string }

// ApplyEnvironments stores which environments nodes report; what a node no longer reports is forgotten. Nodes whose
// report changes nothing share one statement.
func ApplyEnvironments(ctx context.Context, tx db.Tx, reported map[string][]*protocol.InstalledEnvironment) error {
	nodes := slices.Sorted(maps.Keys(reported))
	known := map[string]map[environmentKey][]byte{}
	var (
		node   string
		key    environmentKey
		digest []byte
	)
	if err := db.ForEach(ctx, tx, []any{&node, &key.projectID, &key.digest, &digest}, func() {
		if known[node] == nil {
			known[node] = map[environmentKey][]byte{}
		}
		known[node][key] = bytes.Clone(digest)
	}, `SELECT node_id, project_id, digest, description_sha256 FROM environments WHERE node_id = ANY($1::uuid[])`,
		nodes); err != nil {
		return err
	}
	for _, id := range nodes {
		if err := applyEnvironments(ctx, tx, id, known[id], reported[id]); err != nil {
			return err
		}
	}
	return nil
}

func applyEnvironments(ctx context.Context, tx db.Tx, nodeID string, known map[environmentKey][]byte,
	reported []*protocol.InstalledEnvironment,
) error {
	named := map[environmentKey]bool{}
	for _, r := range reported[:min(len(reported), protocol.MaxEnvironments)] {
		e, ok := boundedEnvironment(r)
		key := environmentKey{e.GetProjectId(), e.GetDigest()}
		if !ok || named[key] {
			continue
		}
		named[key] = true
		raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(e)
		if err != nil {
			return fmt.Errorf("encode an environment: %w", err)
		}
		sum := sha256.Sum256(raw)
		if bytes.Equal(known[key], sum[:]) {
			continue
		}
		description, err := protojson.Marshal(e)
		if err != nil {
			return fmt.Errorf("encode an environment: %w", err)
		}
		if err := tx.Queue(ctx, `INSERT INTO environments (node_id, project_id, digest, description, description_sha256)
			VALUES ($1, $2, $3, $4, $5) ON CONFLICT (project_id, digest, node_id)
			DO UPDATE SET description = excluded.description, description_sha256 = excluded.description_sha256`,
			nodeID, key.projectID, key.digest, description, sum[:]); err != nil {
			return err
		}
	}
	for key := range known {
		if named[key] {
			continue
		}
		if err := RemoveEnvironment(ctx, tx, key.projectID, nodeID, key.digest); err != nil {
			return err
		}
	}
	return nil
}

// boundedEnvironment copies the known fields of an environment, each within its bound; ok is false for one that has no
// usable name.
func boundedEnvironment(r *protocol.InstalledEnvironment) (e *protocol.InstalledEnvironment, ok bool) {
	project, err := uuid.Parse(r.GetProjectId())
	if err != nil || !regexp.MustCompile(`^[0-9a-f]{64}$`).MatchString(r.GetDigest()) {
		return nil, false
	}
	e = &protocol.InstalledEnvironment{
		ProjectId: project.String(),
		Digest:    r.GetDigest(),
		Image:     cutTo(r.GetImage(), maxImageBytes),
		SizeBytes: min(r.GetSizeBytes(), maxMemoryBytes),
		BuiltAt:   boundedTime(r.GetBuiltAt()),
		UsedAt:    boundedTime(r.GetUsedAt()),
	}
	if list, err := requirement.Canonical(r.GetRequirements()); err == nil {
		e.Requirements = list
	}
	for _, id := range r.GetUsedBy()[:min(len(r.GetUsedBy()), protocol.MaxEnvironmentUsers)] {
		if instance, err := uuid.Parse(id); err == nil {
			e.UsedBy = append(e.UsedBy, instance.String())
		}
	}
	return e, true
}

func boundedTime(t *timestamppb.Timestamp) *timestamppb.Timestamp {
	if t.CheckValid() != nil {
		return nil
	}
	return &timestamppb.Timestamp{Seconds: t.GetSeconds()}
}

// environmentsOf selects the environments of a project, of nodes on which it has, or had, an allocation: a node cannot
// show something to anyone else.
const environmentsOf = `SELECT e.node_id, e.description FROM environments e WHERE e.project_id = $1
	AND EXISTS (SELECT 1 FROM allocations a WHERE a.node_id = e.node_id AND a.project_id = e.project_id)`

// Environments lists those of a project by digest and node.
func Environments(ctx context.Context, tx db.Tx, projectID string, page db.Page) ([]Environment, error) {
	return db.Select(ctx, tx, scanEnvironment, environmentsOf+`
		AND e.digest || '.' || e.node_id::TEXT > $2 ORDER BY e.digest || '.' || e.node_id::TEXT LIMIT $3`,
		projectID, page.After, page.Limit)
}

// GetEnvironment reads one of a project's.
func GetEnvironment(ctx context.Context, tx db.Tx, projectID, nodeID, digest string) (Environment, error) {
	found, err := db.Select(ctx, tx, scanEnvironment, environmentsOf+` AND e.node_id = $2 AND e.digest = $3`,
		projectID, nodeID, digest)
	if err == nil && len(found) == 0 {
		err = fault.New(fault.NotFound, fault.CodeNotFound, "There is no such resource.", nil)
	}
	if err != nil {
		return Environment{}, err
	}
	return found[0], nil
}

// RemoveEnvironment forgets an environment that is gone from its node.
func RemoveEnvironment(ctx context.Context, tx db.Tx, projectID, nodeID, digest string) error {
	return tx.Queue(ctx, `DELETE FROM environments WHERE project_id = $1 AND node_id = $2 AND digest = $3`,
		projectID, nodeID, digest)
}

// ForgetEnvironments forgets all environments of a node that is gone for good: it removes none any more.
func ForgetEnvironments(ctx context.Context, tx db.Tx, nodeID string) error {
	return tx.Queue(ctx, `DELETE FROM environments WHERE node_id = $1`, nodeID)
}

func scanEnvironment(row pgx.CollectableRow) (Environment, error) {
	e := Environment{InstalledEnvironment: &protocol.InstalledEnvironment{}}
	var description []byte
	if err := row.Scan(&e.NodeID, &description); err != nil {
		return e, err
	}
	// Another release may have written a field that this one does not know.
	return e, protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(description, e.InstalledEnvironment)
}
