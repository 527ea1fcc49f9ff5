-- +goose NO TRANSACTION
-- +goose Up
-- The segments of a slot that was emptied, packed by store: evidence for the dispute window (ledger.UnpackSegments).
CREATE TABLE IF NOT EXISTS usage_archive (
  -- Of the slot: when its first segments were posted, and when those of the next one were.
  from_at TIMESTAMPTZ NOT NULL,
  to_at TIMESTAMPTZ NOT NULL,
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  first_number INT8 NOT NULL,
  last_number INT8 NOT NULL,
  segments INT8 NOT NULL,
  records INT8 NOT NULL,
  -- Of the unpacked bytes.
  sha256 BYTEA NOT NULL,
  packed BYTEA NOT NULL,
  PRIMARY KEY (from_at, node_id, incarnation, first_number)
);
