-- Segments that were set aside longer ago than their retention (recovery.DeleteOldSetAside).
-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS usage_set_aside_by_time ON usage_set_aside (set_aside_at);

-- +goose Down
DROP INDEX IF EXISTS usage_set_aside_by_time;
