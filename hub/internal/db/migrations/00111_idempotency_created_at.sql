-- The purge goes by age.
-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS idempotency_created_at ON idempotency (created_at);

-- +goose Down
DROP INDEX IF EXISTS idempotency_created_at;
