-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS artifacts_by_app ON artifacts (app_slug, app_version);
