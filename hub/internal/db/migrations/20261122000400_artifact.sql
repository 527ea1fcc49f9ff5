-- Publish intents and pushed artifacts (hub/internal/artifact).
-- +goose NO TRANSACTION
-- +goose Up

CREATE TABLE IF NOT EXISTS publish_intents (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL,
  project_id UUID NOT NULL,
  app_slug TEXT NOT NULL,
  app_version TEXT NOT NULL,
  artifact_name TEXT NOT NULL,
  artifact_kind TEXT NOT NULL,
  channel TEXT NOT NULL,
  repository TEXT NOT NULL,
  tag TEXT NOT NULL,
  created_by_type TEXT NOT NULL,
  created_by_id UUID NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  -- Until when the intent's credential gets tokens.
  expires_at TIMESTAMPTZ NOT NULL
);

CREATE INDEX IF NOT EXISTS publish_intents_by_org ON publish_intents (org_id, expires_at);
CREATE INDEX IF NOT EXISTS publish_intents_by_expiry ON publish_intents (expires_at);

CREATE TABLE IF NOT EXISTS artifacts (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL,
  project_id UUID NOT NULL,
  app_slug TEXT NOT NULL,
  app_version TEXT NOT NULL,
  artifact_name TEXT NOT NULL,
  artifact_kind TEXT NOT NULL,
  repository TEXT NOT NULL,
  digest TEXT NOT NULL,
  media_type TEXT NOT NULL,
  size_bytes INT8 NOT NULL,
  platforms JSONB NOT NULL,
  status TEXT NOT NULL,
  trust_state TEXT NOT NULL,
  channel TEXT NOT NULL,
  evidence JSONB NOT NULL,
  resource_version INT8 NOT NULL,
  created_by_type TEXT NOT NULL,
  created_by_id UUID NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  CONSTRAINT artifacts_once UNIQUE (repository, digest, app_version)
);

CREATE INDEX IF NOT EXISTS artifacts_by_project ON artifacts (project_id, id);
CREATE INDEX IF NOT EXISTS artifacts_by_app ON artifacts (app_slug, app_version);
