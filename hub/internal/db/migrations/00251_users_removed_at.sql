-- The row of a removed user stays, because events and audit rows name it; its address is given up.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE users ADD COLUMN IF NOT EXISTS removed_at TIMESTAMPTZ;
