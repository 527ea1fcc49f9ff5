-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS suspense_records_by_member ON suspense_records (member_id, meter);
