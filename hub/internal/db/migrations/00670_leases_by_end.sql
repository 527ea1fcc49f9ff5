-- Leases that ended long ago (ledger.DeleteOldLeases).
-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS leases_by_end ON leases (expires_at);

-- +goose Down
DROP INDEX IF EXISTS leases_by_end;
