-- +goose NO TRANSACTION
-- +goose Up
CREATE UNIQUE INDEX IF NOT EXISTS prices_by_scope ON prices (meter, app_slug, sku, currency, from_at);
