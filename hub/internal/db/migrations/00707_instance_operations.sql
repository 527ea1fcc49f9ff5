-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS instance_operations (
  id UUID PRIMARY KEY,
  instance_id UUID NOT NULL,
  kind TEXT NOT NULL,
  revision INT8 NOT NULL,
  status TEXT NOT NULL,
  reason TEXT NOT NULL,
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ
);
