-- Each time that this hub came back from a backup.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS restores (
    id          UUID PRIMARY KEY,
    backup_id   UUID NOT NULL,
    taken_at    TIMESTAMPTZ NOT NULL,
    epoch       INT8 NOT NULL,
    restored_at TIMESTAMPTZ NOT NULL
);

-- +goose Down
DROP TABLE IF EXISTS restores;
