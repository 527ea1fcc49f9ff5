-- Whether it was gone when it was removed, so that nobody proved what became of its workloads.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE nodes ADD COLUMN IF NOT EXISTS lost BOOL NOT NULL DEFAULT false;
