-- Tells whether a hello brings other facts, without reading them.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE nodes ADD COLUMN IF NOT EXISTS facts_sha256 BYTEA NOT NULL DEFAULT ''::BYTEA;

-- +goose Down
ALTER TABLE nodes DROP COLUMN IF EXISTS facts_sha256;
