-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS claims (
  allocation_id UUID NOT NULL,
  node_id UUID NOT NULL,
  accelerator_id TEXT NOT NULL,
  claimed_at TIMESTAMPTZ NOT NULL,
  released_at TIMESTAMPTZ,
  PRIMARY KEY (allocation_id, accelerator_id)
);
