-- +goose NO TRANSACTION
-- +goose Up
-- One row a node, changed with every segment: two transactions that bill the same node at once conflict at their first
-- statement, where starting afresh is cheap, and never at a unique key.
CREATE TABLE IF NOT EXISTS usage_nodes (
  node_id UUID PRIMARY KEY,
  segments INT8 NOT NULL
);
