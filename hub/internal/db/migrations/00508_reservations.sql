-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS reservations (
  member_id UUID PRIMARY KEY,
  allocation_id UUID NOT NULL,
  cpu_millis INT8 NOT NULL,
  memory_bytes INT8 NOT NULL,
  reserved_at TIMESTAMPTZ NOT NULL,
  freed_at TIMESTAMPTZ
);
