-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS allocations_by_project ON allocations (project_id, id);
