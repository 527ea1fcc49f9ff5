-- Which hub process works on the database. Its times are the database's own.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS hub_lease (
    name         TEXT PRIMARY KEY,
    holder       TEXT NOT NULL,
    owner        TEXT NOT NULL,
    host         TEXT NOT NULL,
    pid          INT8 NOT NULL,
    since        TIMESTAMPTZ NOT NULL,
    heartbeat_at TIMESTAMPTZ NOT NULL,
    expires_at   TIMESTAMPTZ NOT NULL
);

-- +goose Down
DROP TABLE IF EXISTS hub_lease;
