-- +goose NO TRANSACTION
-- +goose Up
CREATE UNIQUE INDEX IF NOT EXISTS claims_active ON claims (node_id, accelerator_id) WHERE released_at IS NULL;
