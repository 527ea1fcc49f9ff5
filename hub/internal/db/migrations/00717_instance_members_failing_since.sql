-- +goose NO TRANSACTION
-- +goose Up
-- When the node first reported the failure that the member has; NULL while it has not failed.
ALTER TABLE instance_members ADD COLUMN IF NOT EXISTS failing_since TIMESTAMPTZ;
