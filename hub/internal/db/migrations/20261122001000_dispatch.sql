-- The desired states that nodes get (hub/internal/dispatch).
-- +goose NO TRANSACTION
-- +goose Up

-- The signed desired states of each node, newest few. envelope is protocol.Envelope in protobuf: the very bytes that
-- are sent. rev is the intent that the state was compiled from; it moves up when a newer intent compiles to the same
-- content.
CREATE TABLE IF NOT EXISTS node_states (
  node_id UUID NOT NULL,
  epoch INT8 NOT NULL,
  generation INT8 NOT NULL,
  rev INT8 NOT NULL,
  key_id TEXT NOT NULL,
  payload_sha256 BYTEA NOT NULL,
  envelope BYTEA NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  -- The repositories of the images that the state names.
  repositories TEXT[] NOT NULL,
  PRIMARY KEY (node_id, epoch, generation)
);

-- The workload documents that node_states name, by digest. epoch and generation are of the first state that named the
-- part while it is in the newest state, and of the last one afterwards.
CREATE TABLE IF NOT EXISTS node_state_parts (
  node_id UUID NOT NULL,
  sha256 BYTEA NOT NULL,
  epoch INT8 NOT NULL,
  generation INT8 NOT NULL,
  data BYTEA NOT NULL,
  PRIMARY KEY (node_id, sha256)
);
