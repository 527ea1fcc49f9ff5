-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS reserved_accelerators (
  member_id UUID NOT NULL,
  allocation_id UUID NOT NULL,
  node_id UUID NOT NULL,
  accelerator_id TEXT NOT NULL,
  freed_at TIMESTAMPTZ,
  PRIMARY KEY (member_id, accelerator_id)
);
