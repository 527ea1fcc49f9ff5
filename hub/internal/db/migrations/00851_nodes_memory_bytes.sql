-- As nodes.cpu_cores.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE nodes ADD COLUMN IF NOT EXISTS memory_bytes INT8 NOT NULL DEFAULT 0;

-- +goose Down
ALTER TABLE nodes DROP COLUMN IF EXISTS memory_bytes;
