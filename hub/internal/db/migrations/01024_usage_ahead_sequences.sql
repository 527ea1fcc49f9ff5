-- The numbers of the segment's first and last record; NULL in rows of an older release, 0 where they are not known.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE usage_ahead ADD COLUMN IF NOT EXISTS first_sequence INT8, ADD COLUMN IF NOT EXISTS last_sequence INT8;

-- +goose Down
ALTER TABLE usage_ahead DROP COLUMN IF EXISTS first_sequence, DROP COLUMN IF EXISTS last_sequence;
