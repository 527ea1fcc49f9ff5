-- +goose NO TRANSACTION
-- +goose Up
-- Until when such a row is set aside.
ALTER TABLE subjects ADD COLUMN IF NOT EXISTS retry_at TIMESTAMPTZ;
