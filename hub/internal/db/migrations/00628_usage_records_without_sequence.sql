-- +goose NO TRANSACTION
-- +goose Up
-- A record is posted once by usage_sequences, in the same transaction; nothing looks a record up by its number.
DROP INDEX IF EXISTS usage_records_by_sequence CASCADE;
