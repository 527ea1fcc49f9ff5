-- Documents that a node refused; only the newest few of each node are kept.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS node_refusals (
    node_id    UUID NOT NULL,
    id         UUID NOT NULL,
    document   TEXT NOT NULL,
    epoch      INT8 NOT NULL,
    generation INT8 NOT NULL,
    reason     TEXT NOT NULL,
    detail     TEXT NOT NULL,
    at         TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (node_id, id)
);

-- +goose Down
DROP TABLE IF EXISTS node_refusals;
