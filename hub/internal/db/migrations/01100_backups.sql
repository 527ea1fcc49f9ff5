-- Backups that were read back and found whole. As soon as there is one, nodes forget their usage only when it is in one.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS backups (
    id          UUID PRIMARY KEY,
    taken_at    TIMESTAMPTZ NOT NULL,
    size_bytes  INT8 NOT NULL,
    verified_at TIMESTAMPTZ NOT NULL
);

-- +goose Down
DROP TABLE IF EXISTS backups;
