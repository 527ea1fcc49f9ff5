-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS instance_members_by_instance ON instance_members (instance_id);
