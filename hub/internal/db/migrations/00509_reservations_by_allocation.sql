-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS reservations_by_allocation ON reservations (allocation_id) WHERE freed_at IS NULL;
