-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS role_bindings (
  user_id UUID NOT NULL REFERENCES users (id),
  role TEXT NOT NULL,
  scope TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (user_id, role, scope)
);
