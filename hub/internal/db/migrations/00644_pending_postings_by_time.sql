-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS pending_postings_by_time ON pending_postings (since, subject_id);
