-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS postings_by_instance ON postings (app_instance_id, id);
