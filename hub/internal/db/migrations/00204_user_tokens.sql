-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS user_tokens (
  id UUID PRIMARY KEY,
  user_id UUID NOT NULL REFERENCES users (id),
  hash BYTEA NOT NULL UNIQUE,
  description TEXT NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  revoked_at TIMESTAMPTZ,
  created_at TIMESTAMPTZ NOT NULL
);
