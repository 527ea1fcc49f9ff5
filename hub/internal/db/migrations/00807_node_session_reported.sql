-- +goose NO TRANSACTION
-- +goose Up
-- The newest session in which a report was taken; 0 for none since the last release from quarantine.
ALTER TABLE node_sessions ADD COLUMN IF NOT EXISTS reported_session INT8 NOT NULL DEFAULT 0;
