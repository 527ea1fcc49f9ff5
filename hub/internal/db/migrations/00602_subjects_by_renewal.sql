-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS subjects_by_renewal ON subjects (renew_at) WHERE closed_at IS NULL;
