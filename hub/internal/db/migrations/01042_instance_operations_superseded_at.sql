-- Since when the instance has a later operation; NULL while this is its latest.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE instance_operations ADD COLUMN IF NOT EXISTS superseded_at TIMESTAMPTZ;

-- +goose Down
ALTER TABLE instance_operations DROP COLUMN IF EXISTS superseded_at;
