-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE nodes ADD COLUMN IF NOT EXISTS quarantine_reason TEXT NOT NULL DEFAULT '';
