-- +goose NO TRANSACTION
-- +goose Up
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

-- +goose Down
DROP TABLE IF EXISTS entitlements;
