-- +goose NO TRANSACTION
-- +goose Up
CREATE UNIQUE INDEX IF NOT EXISTS service_accounts_slug ON service_accounts (project_id, slug) WHERE deleted_at IS NULL;
