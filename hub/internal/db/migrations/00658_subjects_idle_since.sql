-- +goose NO TRANSACTION
-- +goose Up
-- Since when the member's node has said in each report that nothing of it runs; NULL while something does.
ALTER TABLE subjects ADD COLUMN IF NOT EXISTS idle_since TIMESTAMPTZ;
