-- Which hub process works on the database (hub/internal/db).
-- +goose NO TRANSACTION
-- +goose Up

-- Which hub process works on the database. Its times are the database's own.
CREATE TABLE IF NOT EXISTS hub_lease (
  name TEXT PRIMARY KEY,
  holder TEXT NOT NULL,
  owner TEXT NOT NULL,
  host TEXT NOT NULL,
  pid INT8 NOT NULL,
  since TIMESTAMPTZ NOT NULL,
  heartbeat_at TIMESTAMPTZ NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL
);
