-- A backup that is under way, or was never finished, has no verified_at; from its row on, nodes keep what it may not have.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE backups ALTER COLUMN verified_at DROP NOT NULL;
