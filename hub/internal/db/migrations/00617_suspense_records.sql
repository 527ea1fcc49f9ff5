-- +goose NO TRANSACTION
-- +goose Up
-- What a node measured and nobody is billed for, with the reason. Rows never change.
CREATE TABLE IF NOT EXISTS suspense_records (
  id UUID PRIMARY KEY,
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  sequence INT8 NOT NULL,
  -- As the node said; it may be the id of nothing.
  member_id TEXT NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  reason TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);
