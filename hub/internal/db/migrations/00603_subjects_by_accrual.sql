-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS subjects_by_accrual ON subjects (accrued_until) WHERE closed_at IS NULL AND kind = 'allocation';
