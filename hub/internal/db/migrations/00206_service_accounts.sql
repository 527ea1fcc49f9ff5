-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS service_accounts (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL REFERENCES orgs (id),
  project_id UUID NOT NULL REFERENCES projects (id),
  slug TEXT NOT NULL,
  name TEXT NOT NULL,
  description TEXT NOT NULL,
  role TEXT NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('active', 'disabled')),
  resource_version INT8 NOT NULL DEFAULT 1,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  deleted_at TIMESTAMPTZ
);
