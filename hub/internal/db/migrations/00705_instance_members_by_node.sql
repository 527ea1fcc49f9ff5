-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS instance_members_by_node ON instance_members (node_id) WHERE removed_at IS NULL;
