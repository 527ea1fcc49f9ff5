-- +goose NO TRANSACTION
-- +goose Up
-- The segments of the slot's records, as their nodes signed them (protobuf of gpuaas.v1.Envelope).
CREATE TABLE IF NOT EXISTS usage_segments_7 (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  envelope BYTEA NOT NULL,
  PRIMARY KEY (node_id, incarnation, number)
);
