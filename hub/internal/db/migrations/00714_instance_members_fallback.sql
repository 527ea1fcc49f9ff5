-- +goose NO TRANSACTION
-- +goose Up
-- The revision that the node left by itself for the observed one; 0 where it did not.
ALTER TABLE instance_members ADD COLUMN IF NOT EXISTS fallback_from_revision INT8 NOT NULL DEFAULT 0;
