-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS app_instances_by_project ON app_instances (project_id, id);
