-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS users (
  id UUID PRIMARY KEY,
  org_id UUID REFERENCES orgs (id),
  email TEXT NOT NULL UNIQUE,
  name TEXT NOT NULL,
  platform_admin BOOL NOT NULL,
  resource_version INT8 NOT NULL DEFAULT 1,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  CHECK (org_id IS NOT NULL OR platform_admin)
);
