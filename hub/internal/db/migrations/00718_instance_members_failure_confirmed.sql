-- +goose NO TRANSACTION
-- +goose Up
-- A later report repeated the failure: only then may it end the instance.
ALTER TABLE instance_members ADD COLUMN IF NOT EXISTS failure_confirmed BOOL NOT NULL DEFAULT false;
