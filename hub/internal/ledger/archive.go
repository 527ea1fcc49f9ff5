package ledger

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/klauspost/compress/zstd"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxPartBytes bounds the unpacked bytes of one row of the archive; a single segment may be larger than the rest of
	// the row.
	maxPartBytes = 8 << 20
	// maxPartSegments bounds its segments: what a node seals in a slot, four times over.
	maxPartSegments = 2048
	// maxUnpackedBytes is the most that a row can hold: a full one, and the last segment with what is written before it.
	maxUnpackedBytes = maxPartBytes + 2*protocol.MaxSegmentBytes
)

// SignedSegment is a usage segment as its node signed it.
type SignedSegment struct {
	Incarnation string
	Number      uint64
	// Envelope is the protobuf of protocol.Envelope; protocol.VerifySegment checks it with the node's key.
	Envelope []byte
}

// keepSegments writes the signed segments to the slot.
func keepSegments(ctx context.Context, tx db.Tx, slot Slot, segments []Segment) error {
	signed := slices.DeleteFunc(slices.Clone(segments), func(s Segment) bool { return s.Envelope == nil })
	if len(signed) == 0 {
		return nil
	}
	return db.CopyRows(ctx, tx, `COPY usage_segments_`+slot.number()+
		` (node_id, incarnation, number, envelope) FROM STDIN BINARY`, signed,
		func(w *db.Row, s *Segment) {
			w.UUID(id(s.Store.NodeID))
			w.Text(s.Store.Incarnation)
			w.Int8(int64(s.Link.Number))
			w.Bytes(s.Envelope)
		})
}

// ArchiveNext packs the next segments of an ended slot, all of one store, into a row of the archive; done is true when
// none is left. It goes on after the last row of the slot that is there, so that it can be cut short at any time.
func ArchiveNext(ctx context.Context, tx db.Tx, s Slot) (done bool, err error) {
	node, incarnation, last, err := lastArchived(ctx, tx, s)
	if err != nil {
		return false, err
	}
	found, err := nextSegments(ctx, tx, s, node, incarnation, last)
	if err != nil || len(found) == 0 {
		return err == nil, err
	}
	of := found[0].Store
	first, last := found[0].Number, found[len(found)-1].Number
	segments, err := db.Select(ctx, tx, pgx.RowToStructByPos[SignedSegment],
		`SELECT incarnation, number, envelope FROM usage_segments_`+s.number()+`
		WHERE node_id = $1 AND incarnation = $2 AND number >= $3 AND number <= $4 ORDER BY number`, of.NodeID, of.Incarnation,
		first, last)
	if err != nil {
		return false, err
	}
	packed, sum, err := packSegments(segments)
	if err != nil {
		return false, err
	}
	records, err := countRecords(segments)
	if err != nil {
		return false, err
	}
	_, err = tx.Exec(ctx,
		`INSERT INTO usage_archive (from_at, to_at, node_id, incarnation, first_number, last_number, segments, records,
			sha256, packed)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) ON CONFLICT (from_at, node_id, incarnation, first_number) DO
		NOTHING`,
		s.From, s.To, of.NodeID, of.Incarnation, first, last, int64(len(segments)), records, sum, packed)
	return false, err
}

func lastArchived(ctx context.Context, tx db.Tx, s Slot) (node pgtype.UUID, incarnation string, last int64, err error) {
	err = tx.QueryRow(ctx, `SELECT node_id, incarnation, last_number FROM usage_archive WHERE from_at = $1
		ORDER BY from_at DESC, node_id DESC, incarnation DESC, first_number DESC LIMIT 1`, s.From).Scan(&node, &incarnation,
		&last)
	if db.IsNoRows(err) {
		return pgtype.UUID{Valid: true}, "", 0, nil
	}
	return node, incarnation, last, err
}

// foundSegment is a segment of a slot without its envelope.
type foundSegment struct {
	billing.Store
	Number int64
	Bytes  int64
}

// nextSegments returns the segments of one store that follow others and make up a row of the archive.
func nextSegments(ctx context.Context, tx db.Tx, s Slot, node pgtype.UUID, incarnation string,
	last int64,
) ([]foundSegment, error) {
	found, err := db.Select(ctx, tx, pgx.RowToStructByPos[foundSegment],
		`SELECT node_id, incarnation, number, octet_length(envelope) FROM usage_segments_`+s.number()+`
		WHERE (node_id, incarnation, number) > ($1, $2, $3) ORDER BY node_id, incarnation, number LIMIT $4`, node,
		incarnation, last, maxPartSegments)
	var size int64
	for n, f := range found {
		if size += f.Bytes; n > 0 && (f.Store != found[0].Store || size > maxPartBytes) {
			return found[:n], err
		}
	}
	return found, err
}

func countRecords(segments []SignedSegment) (n int64, err error) {
	for _, s := range segments {
		var (
			env protocol.Envelope
			seg protocol.UsageSegment
		)
		if err := errors.Join(proto.Unmarshal(s.Envelope, &env), proto.Unmarshal(env.GetPayload(), &seg)); err != nil {
			return 0, fmt.Errorf("segment %s/%d: %w", s.Incarnation, s.Number, err)
		}
		n += int64(len(seg.GetRecords()))
	}
	return n, nil
}

// packSegments compresses segments of one store: for each its number and its length as uvarints, then the envelope, all
// in one zstd frame. It returns the SHA-256 of what was compressed.
func packSegments(segments []SignedSegment) (packed, sum []byte, err error) {
	var raw []byte
	for _, s := range segments {
		raw = binary.AppendUvarint(raw, s.Number)
		raw = binary.AppendUvarint(raw, uint64(len(s.Envelope)))
		raw = append(raw, s.Envelope...)
	}
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedBetterCompression))
	if err != nil {
		return nil, nil, err
	}
	packed = enc.EncodeAll(raw, nil)
	digest := sha256.Sum256(raw)
	// Read back before the rows are dropped that it was made of.
	if _, err := unpack(packed, digest[:]); err != nil {
		return nil, nil, err
	}
	return packed, digest[:], enc.Close()
}

// unpack gives back what was compressed and checks its SHA-256.
func unpack(packed, sum []byte) ([]byte, error) {
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxUnpackedBytes))
	if err != nil {
		return nil, err
	}
	defer dec.Close()
	raw, err := dec.DecodeAll(packed, nil)
	if err != nil {
		return nil, err
	}
	if digest := sha256.Sum256(raw); !bytes.Equal(digest[:], sum) {
		return nil, errors.New("the archived segments are not those that were packed")
	}
	return raw, nil
}

// ArchiveKey names a row of the archive.
type ArchiveKey struct {
	From        time.Time
	NodeID      string
	Incarnation string
	First       uint64
}

// Archived is a row of the archive.
type Archived struct {
	ArchiveKey
	To time.Time
	// Sum and Packed are of UnpackSegments.
	Sum, Packed []byte
}

// UnpackSegments returns the segments of a row of the archive.
func (a Archived) UnpackSegments() ([]SignedSegment, error) {
	raw, err := unpack(a.Packed, a.Sum)
	if err != nil {
		return nil, err
	}
	var out []SignedSegment
	for len(raw) > 0 {
		number, n := binary.Uvarint(raw)
		size, m := binary.Uvarint(raw[max(n, 0):])
		if n <= 0 || m <= 0 || size > uint64(len(raw)-n-m) {
			return nil, errors.New("the archived segments are cut short")
		}
		raw = raw[n+m:]
		out, raw = append(out, SignedSegment{a.Incarnation, number, raw[:size]}), raw[size:]
	}
	return out, nil
}

// ArchivedOf returns the next row of a node's archive after another one, of slots that overlap [from, to); ok is false
// when there is none.
func ArchivedOf(ctx context.Context, tx db.Tx, nodeID string, from, to time.Time,
	after ArchiveKey,
) (a Archived, ok bool, err error) {
	err = tx.QueryRow(ctx, `SELECT from_at, to_at, node_id, incarnation, first_number, sha256, packed FROM usage_archive
		WHERE node_id = $1 AND from_at < $3 AND to_at > $2 AND (from_at, incarnation, first_number) > ($4, $5, $6)
		ORDER BY from_at, node_id, incarnation, first_number LIMIT 1`, nodeID, from, to, after.From, after.Incarnation,
		int64(after.First)).
		Scan(&a.From, &a.To, &a.NodeID, &a.Incarnation, &a.First, &a.Sum, &a.Packed)
	if db.IsNoRows(err) {
		return Archived{}, false, nil
	}
	return a, err == nil, err
}

// SegmentsOf returns a node's segments of a slot that is not emptied yet, at most limit after another one.
func SegmentsOf(ctx context.Context, tx db.Tx, s Slot, nodeID string, after SignedSegment,
	limit int,
) ([]SignedSegment, error) {
	return db.Select(ctx, tx, pgx.RowToStructByPos[SignedSegment],
		`SELECT incarnation, number, envelope FROM usage_segments_`+s.number()+`
		WHERE node_id = $1 AND (incarnation, number) > ($2, $3) ORDER BY incarnation, number LIMIT $4`, nodeID,
		after.Incarnation, int64(after.Number), limit)
}

// DropIncompleteArchive reports whether the archive has all segments of an ended slot. Where it has not, because some
// came late, it drops what it has of the slot: they are packed again.
func DropIncompleteArchive(ctx context.Context, tx db.Tx, s Slot) (complete bool, err error) {
	var kept, archived int64
	if err := tx.QueryRow(ctx, `SELECT (SELECT count(*) FROM usage_segments_`+s.number()+
		`), (SELECT coalesce(sum(segments), 0) FROM usage_archive WHERE from_at = $1)::INT8`,
		s.From).Scan(&kept, &archived); err != nil || kept == archived {
		return err == nil, err
	}
	return false, tx.Queue(ctx, `DELETE FROM usage_archive WHERE from_at = $1`, s.From)
}

// DeleteOldArchive deletes a batch of archived segments of slots that ended before a moment.
func DeleteOldArchive(ctx context.Context, tx db.Tx, o db.Old[ArchiveKey]) (last ArchiveKey, n int, err error) {
	node := o.After.NodeID
	if node == "" {
		node = (pgtype.UUID{Valid: true}).String()
	}
	keys, err := db.Select(ctx, tx, pgx.RowToStructByPos[ArchiveKey],
		`SELECT from_at, node_id, incarnation, first_number FROM usage_archive
		WHERE (from_at, node_id, incarnation, first_number) > ($1, $2, $3, $4) AND from_at < $5 AND to_at < $5
		ORDER BY from_at, node_id, incarnation, first_number LIMIT $6`, o.After.From, node, o.After.Incarnation,
		int64(o.After.First), o.Before, o.Limit)
	if err != nil || len(keys) == 0 {
		return ArchiveKey{}, 0, err
	}
	var (
		from                []time.Time
		nodes, incarnations []string
		first               []int64
	)
	for _, k := range keys {
		from, nodes = append(from, k.From), append(nodes, k.NodeID)
		incarnations, first = append(incarnations, k.Incarnation), append(first, int64(k.First))
	}
	return keys[len(keys)-1], len(keys),
		tx.Queue(ctx, `DELETE FROM usage_archive WHERE (from_at, node_id, incarnation, first_number) IN (
		SELECT x.at, x.node, x.Incarnation, x.first FROM unnest($1::timestamptz[], $2::uuid[], $3::text[], $4::int8[]) AS
		x(at, node, incarnation, first))`,
			from, nodes, incarnations, first)
}
