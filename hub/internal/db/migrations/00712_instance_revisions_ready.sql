-- +goose NO TRANSACTION
-- +goose Up
-- When the content of the revision was first ready; NULL while it never was.
ALTER TABLE instance_revisions ADD COLUMN IF NOT EXISTS ready_at TIMESTAMPTZ;
