-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS app_instances_by_org ON app_instances (org_id) WHERE status <> 'decommissioned';
