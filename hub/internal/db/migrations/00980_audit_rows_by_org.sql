-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS audit_rows_by_org ON audit_rows (org_id, id);
