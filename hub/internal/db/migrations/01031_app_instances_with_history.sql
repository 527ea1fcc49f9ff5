-- Decommissioned instances whose operations and revisions are still there (instance.DeleteHistory).
-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS app_instances_with_history ON app_instances (updated_at) WHERE status = 'decommissioned' AND NOT history_deleted;

-- +goose Down
DROP INDEX IF EXISTS app_instances_with_history;
