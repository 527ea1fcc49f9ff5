-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS subjects_by_failure ON subjects (org_id) WHERE failures > 0;
