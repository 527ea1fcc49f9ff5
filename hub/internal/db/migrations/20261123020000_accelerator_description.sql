-- What nodes say of their accelerators beyond model and memory (hub/internal/capacity).
-- +goose NO TRANSACTION
-- +goose Up

-- The bounded message of the protocol, as JSON.
ALTER TABLE accelerators ADD COLUMN IF NOT EXISTS description JSONB NOT NULL DEFAULT '{}';
-- Detects whether a report describes it otherwise, without reading the description.
ALTER TABLE accelerators ADD COLUMN IF NOT EXISTS description_sha256 BYTEA NOT NULL DEFAULT ''::BYTEA;
