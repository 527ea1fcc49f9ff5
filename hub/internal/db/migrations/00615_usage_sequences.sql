-- +goose NO TRANSACTION
-- +goose Up
-- Which of a node's record numbers are posted: joined ranges, so that each is billed once for ever.
CREATE TABLE IF NOT EXISTS usage_sequences (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  from_sequence INT8 NOT NULL,
  to_sequence INT8 NOT NULL,
  PRIMARY KEY (node_id, incarnation, from_sequence)
);
