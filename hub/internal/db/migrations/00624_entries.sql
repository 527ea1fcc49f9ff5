-- +goose NO TRANSACTION
-- +goose Up
-- The legs of postings; those of one posting sum to zero in each currency. Rows never change.
CREATE TABLE IF NOT EXISTS entries (
  posting_id UUID NOT NULL,
  leg INT8 NOT NULL,
  account TEXT NOT NULL,
  currency TEXT NOT NULL,
  amount_nanos INT8 NOT NULL,
  PRIMARY KEY (posting_id, leg)
);
