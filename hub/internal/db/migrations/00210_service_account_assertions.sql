-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS service_account_assertions (
  service_account_id UUID NOT NULL REFERENCES service_accounts (id),
  jti TEXT NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (service_account_id, jti)
);
