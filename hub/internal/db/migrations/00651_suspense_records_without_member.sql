-- +goose NO TRANSACTION
-- +goose Up
DROP INDEX IF EXISTS suspense_records_by_member;
