-- An app is made by its first publish intent (which reserves the slug) or by its first manifest.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS apps (
  slug TEXT PRIMARY KEY,
  -- NULL for apps of the platform itself.
  org_id UUID,
  display_name TEXT NOT NULL,
  description TEXT NOT NULL,
  category TEXT NOT NULL,
  runtime_backend TEXT NOT NULL,
  -- When the layer app: was last taken from a manifest; NULL while the slug is only reserved.
  described_at TIMESTAMPTZ,
  resource_version INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL
);

-- +goose Down
DROP TABLE IF EXISTS apps;
