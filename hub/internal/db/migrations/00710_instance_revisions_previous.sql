-- +goose NO TRANSACTION
-- +goose Up
-- What a rollback without a target goes back to; 0 where there is nothing.
ALTER TABLE instance_revisions ADD COLUMN IF NOT EXISTS previous_revision INT8 NOT NULL DEFAULT 0;
