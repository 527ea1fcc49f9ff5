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

-- The service account of an app instance as its member gets it, sealed to the node.
CREATE TABLE IF NOT EXISTS instance_identities (
  member_id UUID PRIMARY KEY,
  instance_id UUID NOT NULL,
  org_id UUID NOT NULL,
  project_id UUID NOT NULL,
  node_id UUID NOT NULL,
  sealed BYTEA NOT NULL,
  renew_at TIMESTAMPTZ NOT NULL
);

CREATE INDEX IF NOT EXISTS instance_identities_due ON instance_identities (renew_at, member_id);
CREATE INDEX IF NOT EXISTS instance_identities_by_node ON instance_identities (node_id);

-- Access credentials of projects. The hub keeps no private key but in a wrapping token that is not used yet.
CREATE TABLE IF NOT EXISTS access_credentials (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL,
  project_id UUID NOT NULL,
  name TEXT NOT NULL,
  -- In the format of authorized_keys.
  public_key TEXT NOT NULL,
  -- Grows with each key.
  version INT8 NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('active', 'revoked')),
  resource_version INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL
);

CREATE UNIQUE INDEX IF NOT EXISTS access_credentials_name ON access_credentials (project_id, name)
  WHERE status = 'active';
CREATE INDEX IF NOT EXISTS access_credentials_by_project ON access_credentials (project_id, id);

CREATE TABLE IF NOT EXISTS wrapping_tokens (
  id UUID PRIMARY KEY,
  -- SHA-256 of the token.
  hash BYTEA NOT NULL UNIQUE,
  credential_id UUID NOT NULL REFERENCES access_credentials (id),
  -- Who asked for it: nobody else may use it.
  requester_type TEXT NOT NULL,
  requester_id TEXT NOT NULL,
  -- What it wraps, sealed with the hub's key; empty once it is used, or has expired.
  sealed BYTEA NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  used_at TIMESTAMPTZ
);

CREATE INDEX IF NOT EXISTS wrapping_tokens_by_credential ON wrapping_tokens (credential_id);
