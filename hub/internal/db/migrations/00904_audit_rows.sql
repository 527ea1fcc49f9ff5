-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS audit_rows (
  id UUID PRIMARY KEY,
  actor_type TEXT NOT NULL,
  actor_id TEXT NOT NULL,
  action TEXT NOT NULL,
  resource_type TEXT NOT NULL,
  resource_id TEXT NOT NULL,
  org_id UUID,
  project_id UUID,
  correlation_id TEXT NOT NULL,
  outcome TEXT NOT NULL CHECK (outcome IN ('done', 'denied', 'failed')),
  reason TEXT NOT NULL,
  before JSONB,
  after JSONB,
  at TIMESTAMPTZ NOT NULL
);
