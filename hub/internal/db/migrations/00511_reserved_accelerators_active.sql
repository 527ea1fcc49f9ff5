-- +goose NO TRANSACTION
-- +goose Up
CREATE UNIQUE INDEX IF NOT EXISTS reserved_accelerators_active ON reserved_accelerators (node_id, accelerator_id) WHERE freed_at IS NULL;
