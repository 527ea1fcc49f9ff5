-- +goose NO TRANSACTION
-- +goose Up
-- When it said so last.
ALTER TABLE subjects ADD COLUMN IF NOT EXISTS idle_until TIMESTAMPTZ;
