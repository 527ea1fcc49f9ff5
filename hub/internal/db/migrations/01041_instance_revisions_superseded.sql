-- Revisions of which nothing but their age says how long they stay (instance.DeleteOldRevisions).
-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS instance_revisions_superseded ON instance_revisions (superseded_at) WHERE superseded_at IS NOT NULL;

-- +goose Down
DROP INDEX IF EXISTS instance_revisions_superseded;
