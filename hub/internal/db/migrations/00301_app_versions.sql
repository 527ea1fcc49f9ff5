-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS app_versions (
  app_slug TEXT NOT NULL,
  version TEXT NOT NULL,
  id UUID NOT NULL,
  status TEXT NOT NULL,
  -- The manifest's content as JSON, with its defaults; the envelope holds the very bytes that the publisher signed.
  manifest JSONB NOT NULL,
  manifest_envelope BYTEA NOT NULL,
  manifest_sha256 BYTEA NOT NULL,
  publisher_key_id TEXT NOT NULL,
  -- The org slug of the delegation under which it was signed; NULL where a catalog key signed directly.
  publisher_org_slug TEXT,
  published_at TIMESTAMPTZ,
  resource_version INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (app_slug, version)
);

-- +goose Down
DROP TABLE IF EXISTS app_versions;
