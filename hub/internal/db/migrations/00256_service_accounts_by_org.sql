-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS service_accounts_by_org ON service_accounts (org_id) WHERE deleted_at IS NULL;
