-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS publish_intents_by_expiry ON publish_intents (expires_at);
