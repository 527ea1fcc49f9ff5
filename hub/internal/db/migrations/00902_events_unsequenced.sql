-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS events_unsequenced ON events (id) WHERE pos IS NULL;
