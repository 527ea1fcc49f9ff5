-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS app_versions_newest ON app_versions (app_slug, id DESC);

-- +goose Down
DROP INDEX IF EXISTS app_versions_newest;
