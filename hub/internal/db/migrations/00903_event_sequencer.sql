-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS event_sequencer (
  name TEXT PRIMARY KEY,
  holder TEXT NOT NULL,
  lease_until TIMESTAMPTZ NOT NULL,
  last_pos INT8 NOT NULL
);
