-- Limits that an admin has set for an org; a name without a row has the default of the hub's release.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS org_quotas (
  org_id UUID NOT NULL REFERENCES orgs (id),
  name TEXT NOT NULL,
  max_value INT8 NOT NULL CHECK (max_value >= 0),
  updated_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (org_id, name)
);
