-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS subjects_by_node ON subjects (node_id) WHERE settled_at IS NULL;
