-- +goose NO TRANSACTION
-- +goose Up
DROP INDEX IF EXISTS subjects_by_accrual;
