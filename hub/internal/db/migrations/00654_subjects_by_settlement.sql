-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS subjects_by_settlement ON subjects (id) WHERE settled_at IS NULL AND closed_at IS NOT NULL;
