-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS user_tokens_user ON user_tokens (user_id);
