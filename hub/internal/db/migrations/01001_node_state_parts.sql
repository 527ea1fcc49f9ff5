-- The workload documents that node_states name, by digest. epoch and generation are of the first state that named the part while it
-- is in the newest state, and of the last one afterwards.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS node_state_parts (
    node_id    UUID NOT NULL,
    sha256     BYTEA NOT NULL,
    epoch      INT8 NOT NULL,
    generation INT8 NOT NULL,
    data       BYTEA NOT NULL,
    PRIMARY KEY (node_id, sha256)
);

-- +goose Down
DROP TABLE IF EXISTS node_state_parts;
