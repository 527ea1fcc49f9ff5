-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS suspense_records_by_node ON suspense_records (node_id, id);
