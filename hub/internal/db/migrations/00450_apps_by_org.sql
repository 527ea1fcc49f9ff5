-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS apps_by_org ON apps (org_id, slug);
