-- Events and the audit trail (hub/internal/event).
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
  traceparent TEXT NOT NULL,
  data JSONB NOT NULL,
  at TIMESTAMPTZ NOT NULL
);

CREATE INDEX IF NOT EXISTS events_subject ON events (subject, resource_version, id);
CREATE INDEX IF NOT EXISTS events_unsequenced ON events (id) WHERE pos IS NULL;

CREATE TABLE IF NOT EXISTS event_sequencer (
  name TEXT PRIMARY KEY,
  holder TEXT NOT NULL,
  lease_until TIMESTAMPTZ NOT NULL,
  last_pos INT8 NOT NULL
);

CREATE TABLE IF NOT EXISTS audit_rows (
  id UUID PRIMARY KEY,
  actor_type TEXT NOT NULL,
  actor_id TEXT NOT NULL,
  on_behalf_of_type TEXT NOT NULL,
  on_behalf_of_id TEXT NOT NULL,
  action TEXT NOT NULL,
  resource_type TEXT NOT NULL,
  resource_id TEXT NOT NULL,
  org_id UUID,
  project_id UUID,
  correlation_id TEXT NOT NULL,
  source_address TEXT NOT NULL,
  outcome TEXT NOT NULL CHECK (outcome IN ('done', 'denied', 'failed')),
  reason TEXT NOT NULL,
  before JSONB,
  after JSONB,
  at TIMESTAMPTZ NOT NULL,
  chain UUID,
  number INT8,
  previous_hash BYTEA,
  hash BYTEA
);

CREATE INDEX IF NOT EXISTS audit_rows_resource ON audit_rows (resource_type, resource_id, at);
CREATE INDEX IF NOT EXISTS audit_rows_correlation ON audit_rows (correlation_id);
CREATE INDEX IF NOT EXISTS audit_rows_by_org ON audit_rows (org_id, id);
CREATE INDEX IF NOT EXISTS audit_rows_unchained ON audit_rows (id) WHERE number IS NULL;
CREATE UNIQUE INDEX IF NOT EXISTS audit_rows_chain ON audit_rows (chain, number) WHERE number IS NOT NULL;

-- The last record of each org's chain; the platform's has the nil UUID.
CREATE TABLE IF NOT EXISTS audit_heads (
  chain UUID PRIMARY KEY,
  number INT8 NOT NULL,
  hash BYTEA NOT NULL
);
