-- +goose NO TRANSACTION
-- +goose Up
-- What of a member's usage is in suspense by its own node's measurement, without what was billed before. quantity is bounded by what
-- can have been measured; leased_quantity is what the latest lease's cap makes up for.
CREATE TABLE IF NOT EXISTS suspense_totals (
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  leased_quantity INT8 NOT NULL,
  PRIMARY KEY (subject_id, meter)
);
