-- Up to where the segments are in a verified backup, too. Nodes keep what is above it.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE usage_marks ADD COLUMN IF NOT EXISTS archived INT8 NOT NULL DEFAULT 0;

-- +goose Down
ALTER TABLE usage_marks DROP COLUMN IF EXISTS archived;
