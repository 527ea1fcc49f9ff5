-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS events_subject ON events (subject, resource_version, id);
