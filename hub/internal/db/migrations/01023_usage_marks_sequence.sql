-- The number of the last record up to the mark, NULL where that is not known. It counts only where last_sequence_segment is the mark's own
-- number: an older release moves the mark and leaves both columns as they are.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE usage_marks ADD COLUMN IF NOT EXISTS last_sequence INT8, ADD COLUMN IF NOT EXISTS last_sequence_segment INT8;

-- +goose Down
ALTER TABLE usage_marks DROP COLUMN IF EXISTS last_sequence, DROP COLUMN IF EXISTS last_sequence_segment;
