-- The repositories of the images that the state names; NULL in states from before this column.
-- +goose NO TRANSACTION
-- +goose Up
ALTER TABLE node_states ADD COLUMN IF NOT EXISTS repositories TEXT[];

-- +goose Down
ALTER TABLE node_states DROP COLUMN IF EXISTS repositories;
