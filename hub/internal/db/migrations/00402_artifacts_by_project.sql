-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS artifacts_by_project ON artifacts (project_id, id);

-- +goose Down
DROP INDEX IF EXISTS artifacts_by_project;
