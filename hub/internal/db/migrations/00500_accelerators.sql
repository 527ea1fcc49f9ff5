-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS accelerators (
  node_id UUID NOT NULL,
  id TEXT NOT NULL,
  vendor TEXT NOT NULL,
  model TEXT NOT NULL,
  memory_bytes INT8 NOT NULL,
  -- As the node said last: ok, or what ails it; missing when the last report did not name it.
  health TEXT NOT NULL,
  first_seen_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (node_id, id)
);
