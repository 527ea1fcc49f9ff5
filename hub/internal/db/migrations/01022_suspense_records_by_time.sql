-- How many rows a node has written lately (ledger.withinBudget).
-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS suspense_records_by_time ON suspense_records (node_id, created_at);

-- +goose Down
DROP INDEX IF EXISTS suspense_records_by_time;
