-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS publish_intents_by_org ON publish_intents (org_id, expires_at);
