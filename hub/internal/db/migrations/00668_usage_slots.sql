-- +goose NO TRANSACTION
-- +goose Up
-- The slots that hold something. The current one has the newest from_at; each of the others ends where the next begins.
CREATE TABLE IF NOT EXISTS usage_slots (
  slot INT8 PRIMARY KEY,
  from_at TIMESTAMPTZ NOT NULL
);
