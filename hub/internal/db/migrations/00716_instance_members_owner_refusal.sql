-- +goose NO TRANSACTION
-- +goose Up
-- The signed word of the node's owner, where that is why a member does not run.
ALTER TABLE instance_members ADD COLUMN IF NOT EXISTS owner_refusal BYTEA;
