-- When an admin took the node out of the mesh for good.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE nodes ADD COLUMN IF NOT EXISTS removed_at TIMESTAMPTZ;
