-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS service_account_keys (
  id UUID PRIMARY KEY,
  service_account_id UUID NOT NULL REFERENCES service_accounts (id),
  public_key BYTEA NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  revoked_at TIMESTAMPTZ
);
