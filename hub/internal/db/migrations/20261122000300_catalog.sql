-- Apps, their versions and who may publish and run them (hub/internal/catalog).
-- +goose NO TRANSACTION
-- +goose Up

-- An app is made by its first publish intent (which reserves the slug) or by its first manifest.
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

CREATE INDEX IF NOT EXISTS apps_by_org ON apps (org_id, slug);

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
  -- The share of projects that may launch a canary.
  canary_percent INT8 NOT NULL DEFAULT 0,
  published_at TIMESTAMPTZ,
  resource_version INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (app_slug, version)
);

CREATE INDEX IF NOT EXISTS app_versions_newest ON app_versions (app_slug, id DESC);

-- The newest delegation of each publisher key and org.
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

CREATE TABLE IF NOT EXISTS entitlements (
  project_id UUID NOT NULL,
  app_slug TEXT NOT NULL,
  org_id UUID NOT NULL,
  enabled BOOLEAN NOT NULL,
  policy_overrides JSONB NOT NULL,
  resource_version INT8 NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  updated_by UUID NOT NULL,
  PRIMARY KEY (project_id, app_slug)
);
