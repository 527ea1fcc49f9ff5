-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS allocations_by_node ON allocations (node_id) WHERE released_at IS NULL;
