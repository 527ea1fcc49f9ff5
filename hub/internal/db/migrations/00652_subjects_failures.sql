-- +goose NO TRANSACTION
-- +goose Up
-- How often in a row a periodic pass could not process the row.
ALTER TABLE subjects ADD COLUMN IF NOT EXISTS failures INT8 NOT NULL DEFAULT 0;
