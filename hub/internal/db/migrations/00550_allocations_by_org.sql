-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS allocations_by_org ON allocations (org_id) WHERE released_at IS NULL;
