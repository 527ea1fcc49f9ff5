-- +goose NO TRANSACTION
-- +goose Up
-- What was measured and accepted while the slot was the current one (usage_slots). Whose it is, subjects say.
CREATE TABLE IF NOT EXISTS usage_records_6 (
  id UUID PRIMARY KEY,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  run_id TEXT NOT NULL,
  lease_no INT8 NOT NULL,
  posting_id UUID,
  UNIQUE (subject_id, id)
);
