-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS usage_records_by_instance ON usage_records (app_instance_id, id);
