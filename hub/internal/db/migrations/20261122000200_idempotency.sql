-- Answers to repeated requests (hub/internal/command).
-- +goose NO TRANSACTION
-- +goose Up

-- Answers to requests that carried X-Idempotency-Key, so that asking again has no second effect. Kept for 24 hours.
-- response is NULL only inside the transaction that is still working; sealed where it holds a secret.
-- body_mac is a keyed digest: a body may hold a secret.
CREATE TABLE IF NOT EXISTS idempotency (
  principal_type TEXT NOT NULL,
  principal_id TEXT NOT NULL,
  route TEXT NOT NULL,
  key TEXT NOT NULL,
  body_mac BYTEA NOT NULL,
  response BYTEA,
  created_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (principal_type, principal_id, route, key)
);

-- The purge goes by age.
CREATE INDEX IF NOT EXISTS idempotency_created_at ON idempotency (created_at);
