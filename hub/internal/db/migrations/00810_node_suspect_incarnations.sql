-- +goose NO TRANSACTION
-- +goose Up
-- Incarnations that were heard while the node was quarantined, newest last: a store that bears one must take a new one.
ALTER TABLE nodes ADD COLUMN IF NOT EXISTS suspect_incarnations JSONB NOT NULL DEFAULT '[]';
