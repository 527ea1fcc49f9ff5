-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS postings_by_project ON postings (project_id, id);
