-- Operations that later ones of their instances have followed (instance.DeleteOldOperations).
-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS instance_operations_superseded ON instance_operations (superseded_at) WHERE superseded_at IS NOT NULL;

-- +goose Down
DROP INDEX IF EXISTS instance_operations_superseded;
