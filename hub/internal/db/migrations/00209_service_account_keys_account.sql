-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS service_account_keys_account ON service_account_keys (service_account_id);
