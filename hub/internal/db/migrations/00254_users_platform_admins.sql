-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS users_platform_admins ON users (created_at, id) WHERE platform_admin;
