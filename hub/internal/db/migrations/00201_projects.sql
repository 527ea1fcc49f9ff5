-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS projects (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL REFERENCES orgs (id),
  slug TEXT NOT NULL,
  name TEXT NOT NULL,
  resource_version INT8 NOT NULL DEFAULT 1,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  UNIQUE (org_id, slug)
);
