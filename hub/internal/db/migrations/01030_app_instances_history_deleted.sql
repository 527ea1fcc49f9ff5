-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE app_instances ADD COLUMN IF NOT EXISTS history_deleted BOOL NOT NULL DEFAULT false;

-- +goose Down
ALTER TABLE app_instances DROP COLUMN IF EXISTS history_deleted;
