-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS entries_by_account ON entries (account, currency);
