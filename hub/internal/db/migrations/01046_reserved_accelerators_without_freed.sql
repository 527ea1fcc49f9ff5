-- As reservations.
-- +goose NO TRANSACTION
-- +goose Up
DELETE FROM reserved_accelerators WHERE freed_at IS NOT NULL;

-- +goose Down
SELECT 1;
