-- What placement needs of the facts, which are for showing only.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE nodes ADD COLUMN IF NOT EXISTS cpu_cores INT8 NOT NULL DEFAULT 0;

-- +goose Down
ALTER TABLE nodes DROP COLUMN IF EXISTS cpu_cores;
