-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS users_by_org ON users (org_id, id) WHERE removed_at IS NULL;
