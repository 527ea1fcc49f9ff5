-- +goose NO TRANSACTION
-- +goose Up
-- The incarnation of the node that spoke of the member last; empty where none did, or before this was kept.
ALTER TABLE instance_members ADD COLUMN IF NOT EXISTS observed_incarnation TEXT NOT NULL DEFAULT '';
