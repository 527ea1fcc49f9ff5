-- A reservation goes when it is freed: nothing reads a freed one.
-- +goose NO TRANSACTION
-- +goose Up
DELETE FROM reservations WHERE freed_at IS NOT NULL;

-- +goose Down
SELECT 1;
