-- +goose NO TRANSACTION
-- +goose Up
CREATE UNIQUE INDEX IF NOT EXISTS usage_records_by_sequence ON usage_records (node_id, incarnation, sequence);
