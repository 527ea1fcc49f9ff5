-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS usage_records_by_project ON usage_records (project_id, id);
