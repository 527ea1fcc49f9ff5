-- +goose NO TRANSACTION
-- +goose Up
-- The journal. Rows never change; a correction is a new row that names the old one.
CREATE TABLE IF NOT EXISTS postings (
  id UUID PRIMARY KEY,
  -- Of whoever posts: the same thing is never posted twice.
  key TEXT NOT NULL UNIQUE,
  kind TEXT NOT NULL,
  subject_kind TEXT NOT NULL,
  subject_id UUID NOT NULL,
  org_id UUID NOT NULL,
  project_id UUID,
  app_instance_id UUID,
  meter TEXT NOT NULL,
  price_id UUID,
  period_from TIMESTAMPTZ,
  period_to TIMESTAMPTZ,
  corrects UUID,
  description TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);
