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

-- +goose Down
DROP TABLE IF EXISTS publish_intents;
