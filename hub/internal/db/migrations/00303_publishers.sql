-- The newest delegation of each publisher key and org.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS publishers (
  key_id TEXT NOT NULL,
  -- Empty for apps of the platform.
  org_slug TEXT NOT NULL,
  public_key BYTEA NOT NULL,
  repository_prefixes JSONB NOT NULL,
  issued_at TIMESTAMPTZ NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  delegation_envelope BYTEA NOT NULL,
  resource_version INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (key_id, org_slug)
);

-- +goose Down
DROP TABLE IF EXISTS publishers;
