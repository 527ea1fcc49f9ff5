-- Since when nothing goes back to the revision (instance.supersede); NULL while something may.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE instance_revisions ADD COLUMN IF NOT EXISTS superseded_at TIMESTAMPTZ;

-- +goose Down
ALTER TABLE instance_revisions DROP COLUMN IF EXISTS superseded_at;
