-- Nodes that share a LAN and a gossip key.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS sites (
    id         UUID PRIMARY KEY,
    slug       TEXT NOT NULL UNIQUE,
    name       TEXT NOT NULL,
    created_at TIMESTAMPTZ NOT NULL
);

-- +goose Down
DROP TABLE IF EXISTS sites;
