-- +goose NO TRANSACTION
-- +goose Up
-- Balances are kept (wallets, holds); nothing adds up the entries of an account.
DROP INDEX IF EXISTS entries_by_account;
