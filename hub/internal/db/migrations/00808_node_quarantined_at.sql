-- +goose NO TRANSACTION
-- +goose Up
-- NULL where the node is not quarantined.
ALTER TABLE nodes ADD COLUMN IF NOT EXISTS quarantined_at TIMESTAMPTZ;
