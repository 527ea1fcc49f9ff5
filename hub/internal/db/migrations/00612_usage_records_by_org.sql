-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS usage_records_by_org ON usage_records (org_id, id);
