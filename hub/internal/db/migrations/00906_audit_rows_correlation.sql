-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS audit_rows_correlation ON audit_rows (correlation_id);
