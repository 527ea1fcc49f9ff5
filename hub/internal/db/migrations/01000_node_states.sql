-- The signed desired states of each node, newest few. envelope is protocol.Envelope in protobuf: the very bytes that are sent.
-- rev is the intent that the state was compiled from; it moves up when a newer intent compiles to the same content.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS node_states (
    node_id        UUID NOT NULL,
    epoch          INT8 NOT NULL,
    generation     INT8 NOT NULL,
    rev            INT8 NOT NULL,
    key_id         TEXT NOT NULL,
    payload_sha256 BYTEA NOT NULL,
    envelope       BYTEA NOT NULL,
    created_at     TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (node_id, epoch, generation)
);

-- +goose Down
DROP TABLE IF EXISTS node_states;
