-- +goose NO TRANSACTION
-- +goose Up
-- What the node goes back to by itself while the revision is an upgrade under way; 0 where it may not.
ALTER TABLE instance_revisions ADD COLUMN IF NOT EXISTS fallback_revision INT8 NOT NULL DEFAULT 0;
