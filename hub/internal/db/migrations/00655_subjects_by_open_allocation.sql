-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS subjects_by_open_allocation ON subjects (id) WHERE closed_at IS NULL AND kind = 'allocation';
