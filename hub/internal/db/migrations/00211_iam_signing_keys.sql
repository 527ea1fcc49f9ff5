-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS iam_signing_keys (
  id UUID PRIMARY KEY,
  public_key BYTEA NOT NULL,
  sealed_private_key BYTEA NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);
