-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS instance_operations_by_instance ON instance_operations (instance_id);
