-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS role_bindings_by_scope ON role_bindings (scope, user_id);
