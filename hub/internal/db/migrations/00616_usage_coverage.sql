-- +goose NO TRANSACTION
-- +goose Up
-- Which time of a subject is billed: joined intervals, over all incarnations of the node's store.
CREATE TABLE IF NOT EXISTS usage_coverage (
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  -- Empty for session_seconds, which counts once per member, whatever containers it has.
  run_id TEXT NOT NULL,
  from_at TIMESTAMPTZ NOT NULL,
  to_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (subject_id, meter, run_id, from_at)
);
