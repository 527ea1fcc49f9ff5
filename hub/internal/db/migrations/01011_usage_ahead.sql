-- Segments that are posted although one before them is missing; a row goes when the mark has passed it.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS usage_ahead (
    node_id         UUID NOT NULL,
    incarnation     TEXT NOT NULL,
    number          INT8 NOT NULL,
    sha256          BYTEA NOT NULL,
    previous_sha256 BYTEA NOT NULL,
    posted_at       TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (node_id, incarnation, number)
);

-- +goose Down
DROP TABLE IF EXISTS usage_ahead;
