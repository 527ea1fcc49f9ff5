-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS wallets (
  org_id UUID NOT NULL,
  currency TEXT NOT NULL,
  -- The sum of the entries of account wallet:<org_id>.
  balance_nanos INT8 NOT NULL CHECK (balance_nanos >= 0),
  created_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (org_id, currency)
);
