-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS holds (
  id UUID PRIMARY KEY,
  subject_id UUID NOT NULL UNIQUE,
  org_id UUID NOT NULL,
  currency TEXT NOT NULL,
  -- All three only grow; placed - posted - released is the sum of the entries of account hold:<id>.
  placed_nanos INT8 NOT NULL,
  posted_nanos INT8 NOT NULL,
  released_nanos INT8 NOT NULL,
  CONSTRAINT holds_never_overdrawn CHECK (placed_nanos >= posted_nanos + released_nanos)
);
