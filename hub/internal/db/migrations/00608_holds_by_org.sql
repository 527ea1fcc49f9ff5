-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS holds_by_org ON holds (org_id, currency);
