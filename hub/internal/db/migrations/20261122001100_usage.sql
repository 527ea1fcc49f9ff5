-- The chains of usage segments: what of each store is posted (hub/internal/ledger) or set aside (hub/internal/nodes).
-- +goose NO TRANSACTION
-- +goose Up

-- For each store of a node: every segment up to number is posted. sha256 is of the payload of segment number. Kept for
-- ever, so that a segment is posted once however late it is sent again. A transaction that posts locks the row first.
CREATE TABLE IF NOT EXISTS usage_watermarks (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  sha256 BYTEA NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  -- The last segment that is in a verified backup, too. Nodes keep those above it.
  archived INT8 NOT NULL DEFAULT 0,
  -- The number of the last record up to the watermark.
  last_record INT8 NOT NULL DEFAULT 0,
  PRIMARY KEY (node_id, incarnation)
);

-- Segments that are posted although one before them is missing; a row is deleted when the watermark has passed it.
CREATE TABLE IF NOT EXISTS usage_ahead (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  sha256 BYTEA NOT NULL,
  previous_sha256 BYTEA NOT NULL,
  posted_at TIMESTAMPTZ NOT NULL,
  -- The numbers of the segment's first and last record; 0 for a segment without records whose predecessor is missing.
  first_record INT8 NOT NULL,
  last_record INT8 NOT NULL,
  PRIMARY KEY (node_id, incarnation, number)
);

-- Segments that the database did not take, as the node signed them. The watermark has passed them; each is a finding.
CREATE TABLE IF NOT EXISTS usage_set_aside (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  envelope BYTEA NOT NULL,
  cause TEXT NOT NULL,
  set_aside_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (node_id, incarnation, number)
);

-- Segments that were set aside longer ago than their retention (finding.DeleteOldSetAside).
CREATE INDEX IF NOT EXISTS usage_set_aside_by_time ON usage_set_aside (set_aside_at);
