-- +goose NO TRANSACTION
-- +goose Up
-- The last session that the process behind the present one was welcomed to before, as it says; 0 for a process that is new.
ALTER TABLE node_sessions ADD COLUMN IF NOT EXISTS last_session INT8 NOT NULL DEFAULT 0;
