-- Secrets of projects (hub/internal/secret).
-- +goose NO TRANSACTION
-- +goose Up

CREATE TABLE IF NOT EXISTS runtime_secrets (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL,
  project_id UUID NOT NULL,
  name TEXT NOT NULL,
  -- Grows with each value.
  version INT8 NOT NULL,
  -- The newest value, sealed with the hub's key; empty once it is revoked.
  sealed BYTEA NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('active', 'revoked')),
  resource_version INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  UNIQUE (project_id, name)
);

-- The newest value for each parameter of a member that refers to a secret, sealed to the node.
CREATE TABLE IF NOT EXISTS runtime_secret_deliveries (
  member_id UUID NOT NULL,
  parameter TEXT NOT NULL,
  secret_id UUID NOT NULL REFERENCES runtime_secrets (id),
  instance_id UUID NOT NULL,
  node_id UUID NOT NULL,
  sealed BYTEA NOT NULL,
  PRIMARY KEY (member_id, parameter, secret_id)
);

CREATE INDEX IF NOT EXISTS runtime_secret_deliveries_by_secret ON runtime_secret_deliveries (secret_id);
