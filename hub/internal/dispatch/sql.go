package dispatch

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/nodelink"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/protocol"
)

// keepStates is how many states of a node, and the parts that they name, are kept: a node may fetch a part of the state
// before the newest.
const keepStates = 4

// stateHeader is the newest state of a node, without its documents.
type stateHeader struct {
	nodeID     string
	epoch      uint64
	generation uint64
	rev        int64
	keyID      string
	sha256     []byte
}

const headerColumns = `node_id, epoch, generation, rev, key_id, payload_sha256`

func (h stateHeader) version() plan.StateVersion {
	return plan.StateVersion{Epoch: h.epoch, Generation: h.generation, SHA256: h.sha256}
}

// heldBy returns the state that a node acknowledged.
func heldBy(acked nodelink.AckedState) plan.StateVersion {
	return plan.StateVersion{Epoch: acked.Epoch, Generation: acked.Generation, SHA256: acked.StateSHA256}
}

func scanHeader(row pgx.CollectableRow) (h stateHeader, err error) {
	err = row.Scan(&h.nodeID, &h.epoch, &h.generation, &h.rev, &h.keyID, &h.sha256)
	return h, err
}

// newestHeader returns the node's newest state; its generation is 0 when there is none.
func newestHeader(ctx context.Context, tx db.Tx, nodeID string) (stateHeader, error) {
	h, err := db.SelectOne(ctx, tx, scanHeader, `SELECT `+headerColumns+
		` FROM node_states WHERE node_id = $1 ORDER BY epoch DESC, generation DESC LIMIT 1`, nodeID)
	if db.IsNoRows(err) {
		return stateHeader{nodeID: nodeID}, nil
	}
	return h, err
}

// NewestGeneration returns the generation of the node's newest state; 0 when there is none.
func NewestGeneration(ctx context.Context, tx db.Tx, nodeID string) (uint64, error) {
	h, err := newestHeader(ctx, tx, nodeID)
	return h.generation, err
}

// NewestGenerations returns the generations of the nodes' newest states; a node without one is left out.
func NewestGenerations(ctx context.Context, tx db.Tx, nodeIDs ...string) (map[string]uint64, error) {
	return db.CollectMap[string, uint64](tx.Query(ctx, `SELECT DISTINCT ON (node_id) node_id, generation FROM node_states
		WHERE node_id = ANY($1::uuid[]) ORDER BY node_id, epoch DESC, generation DESC`, nodeIDs))
}

// NewestState returns the version of the node's newest state; a generation of 0 when there is none.
func NewestState(ctx context.Context, tx db.Tx, nodeID string) (plan.StateVersion, error) {
	h, err := newestHeader(ctx, tx, nodeID)
	return h.version(), err
}

// selectOutdated returns the nodes whose newest state is not compiled from the latest intent, or not signed with the
// current key.
func selectOutdated(ctx context.Context, tx db.Tx, keyID string) ([]string, error) {
	return db.CollectColumn[string](tx.Query(ctx, `SELECT n.id FROM nodes n JOIN node_intents i ON i.node_id = n.id
		WHERE n.banned_at IS NULL AND n.quarantined_at IS NULL AND n.resync <> 'awaiting' AND (n.removed_at IS NULL OR n.lost)
		AND NOT EXISTS (SELECT 1
		FROM node_states s WHERE s.node_id = n.id AND s.rev = i.rev AND s.key_id = $1)
		ORDER BY n.id`, keyID))
}

// document is a saved state. Only states that were read back are pushed, never those that are about to be saved.
type document struct {
	stateHeader
	envelope *protocol.Envelope
	state    *protocol.DesiredState
}

func selectNewest(ctx context.Context, tx db.Tx, nodeID string) (document, error) {
	var (
		d    = document{envelope: &protocol.Envelope{}, state: &protocol.DesiredState{}}
		data []byte
	)
	err := tx.QueryRow(ctx, `SELECT `+headerColumns+
		`, envelope FROM node_states WHERE node_id = $1 ORDER BY epoch DESC, generation DESC LIMIT 1`, nodeID).
		Scan(&d.nodeID, &d.epoch, &d.generation, &d.rev, &d.keyID, &d.sha256, &data)
	if err != nil {
		return document{}, err
	}
	if err := proto.Unmarshal(data, d.envelope); err != nil {
		return document{}, fmt.Errorf("state %d of node %s: %w", d.generation, nodeID, err)
	}
	if err := proto.Unmarshal(d.envelope.GetPayload(), d.state); err != nil {
		return document{}, fmt.Errorf("state %d of node %s: %w", d.generation, nodeID, err)
	}
	return d, nil
}

// selectParts returns those parts of a state that fit into one push; the node fetches the others.
func selectParts(ctx context.Context, tx db.Tx, d document) ([][]byte, error) {
	var (
		digests [][]byte
		total   uint64
	)
	for _, ref := range d.state.GetParts() {
		if total+ref.GetSizeBytes() > protocol.MaxPushPartsBytes {
			continue
		}
		total += ref.GetSizeBytes()
		digests = append(digests, ref.GetSha256())
	}
	if len(digests) == 0 {
		return nil, nil
	}
	return db.CollectColumn[[]byte](tx.Query(ctx,
		`SELECT data FROM node_state_parts WHERE node_id = $1 AND sha256 = ANY($2)`, d.nodeID, digests))
}

// selectDocuments reads the documents that a state names, by member; a missing one is left out.
func selectDocuments(ctx context.Context, tx db.Tx, nodeID string,
	refs []*protocol.PartRef,
) (map[string][]byte, error) {
	out := make(map[string][]byte, len(refs))
	for _, ref := range refs {
		data, err := selectPart(ctx, tx, nodeID, ref.GetSha256())
		if err != nil && !db.IsNoRows(err) {
			return nil, err
		}
		out[ref.GetId()] = data
	}
	return out, nil
}

func selectPart(ctx context.Context, tx db.Tx, nodeID string, sha256 []byte) ([]byte, error) {
	return db.Value[[]byte](ctx, tx, `SELECT data FROM node_state_parts WHERE node_id = $1 AND sha256 = $2`, nodeID,
		sha256)
}

// insertState saves a state that follows a former one with these parts. A part of both is unchanged; a part of the
// former only gets its order, so that it is kept as long as that state.
func insertState(ctx context.Context, tx db.Tx, h, former stateHeader, formerParts []*protocol.PartRef, envelope []byte,
	state plan.NodeState, now time.Time,
) error {
	if err := tx.Queue(ctx, `INSERT INTO node_states (`+headerColumns+`, envelope, created_at, repositories)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)`,
		h.nodeID, h.epoch, h.generation, h.rev, h.keyID, h.sha256, envelope, now, repositoriesOf(state.Parts)); err != nil {
		return err
	}
	dropped := map[string]bool{}
	for _, p := range formerParts {
		dropped[string(p.GetSha256())] = true
	}
	var named, left, fresh, documents [][]byte
	for _, p := range state.Parts {
		named = append(named, p.SHA256[:])
		if !dropped[string(p.SHA256[:])] {
			fresh, documents = append(fresh, p.SHA256[:]), append(documents, p.Bytes)
		}
		delete(dropped, string(p.SHA256[:]))
	}
	for _, digest := range slices.Sorted(maps.Keys(dropped)) {
		left = append(left, []byte(digest))
	}
	if len(fresh) > 0 {
		if err := tx.Queue(ctx, `INSERT INTO node_state_parts (node_id, sha256, epoch, generation, data)
			SELECT $1::uuid, x.sha256, $3::int8, $4::int8, x.data FROM unnest($2::bytea[], $5::bytea[]) AS x(sha256, data)
			ON CONFLICT (node_id, sha256) DO UPDATE SET epoch = excluded.epoch, generation = excluded.generation`,
			h.nodeID, fresh, h.epoch, h.generation, documents); err != nil {
			return err
		}
	}
	if len(left) > 0 {
		if err := tx.Queue(ctx,
			`UPDATE node_state_parts SET epoch = $3, generation = $4 WHERE node_id = $1 AND sha256 = ANY($2)`,
			h.nodeID, left, former.epoch, former.generation); err != nil {
			return err
		}
	}
	return prune(ctx, tx, h.nodeID, named)
}

// prune deletes all but the newest states of a node, and the parts that no kept state names; named are the parts of the
// newest.
func prune(ctx context.Context, tx db.Tx, nodeID string, named [][]byte) error {
	const oldest = `(SELECT s.epoch, s.generation FROM node_states s WHERE s.node_id = $1
		ORDER BY s.epoch DESC, s.generation DESC OFFSET $2 LIMIT 1)`
	if err := tx.Queue(ctx, `DELETE FROM node_state_parts WHERE node_id = $1 AND (epoch, generation) < `+oldest+
		` AND sha256 <> ALL($3::bytea[])`,
		nodeID, keepStates-1, append([][]byte{}, named...)); err != nil {
		return err
	}
	return tx.Queue(ctx, `DELETE FROM node_states WHERE node_id = $1 AND (epoch, generation) < `+oldest, nodeID,
		keepStates-1)
}

// updateRev records the intent that the state is compiled from.
func updateRev(ctx context.Context, tx db.Tx, h stateHeader, rev int64) error {
	return tx.Queue(ctx, `UPDATE node_states SET rev = $4 WHERE node_id = $1 AND epoch = $2 AND generation = $3`, h.nodeID,
		h.epoch, h.generation, rev)
}
