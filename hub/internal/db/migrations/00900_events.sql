-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS events (
  id UUID PRIMARY KEY,
  pos INT8 UNIQUE,
  type TEXT NOT NULL,
  subject TEXT NOT NULL,
  resource_version INT8 NOT NULL,
  org_id UUID,
  project_id UUID,
  correlation_id TEXT NOT NULL,
  trace_id TEXT NOT NULL,
  data JSONB NOT NULL,
  at TIMESTAMPTZ NOT NULL
);
