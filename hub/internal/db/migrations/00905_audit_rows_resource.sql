-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS audit_rows_resource ON audit_rows (resource_type, resource_id, at);
