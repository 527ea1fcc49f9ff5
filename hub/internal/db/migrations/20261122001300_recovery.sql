-- Backups, restores and what a restored hub misses (hub/internal/backup, hub/internal/recovery).
-- +goose NO TRANSACTION
-- +goose Up

-- Backups that were read back and found whole. As soon as there is one, nodes forget their usage only when it is in
-- one. A backup that is under way, or was never finished, has no verified_at; from its row on, nodes keep what it may
-- not have.
CREATE TABLE IF NOT EXISTS backups (
  id UUID PRIMARY KEY,
  taken_at TIMESTAMPTZ NOT NULL,
  size_bytes INT8 NOT NULL,
  verified_at TIMESTAMPTZ
);

-- Each time that this hub came back from a backup.
CREATE TABLE IF NOT EXISTS restores (
  id UUID PRIMARY KEY,
  backup_id UUID NOT NULL,
  taken_at TIMESTAMPTZ NOT NULL,
  epoch INT8 NOT NULL,
  restored_at TIMESTAMPTZ NOT NULL
);

-- What contradicts the restored rows since the last restore; an admin looks at it.
CREATE TABLE IF NOT EXISTS recovery_findings (
  id UUID PRIMARY KEY,
  node_id UUID NOT NULL,
  kind TEXT NOT NULL,
  resource_type TEXT NOT NULL,
  resource_id TEXT NOT NULL,
  detail TEXT NOT NULL,
  found_at TIMESTAMPTZ NOT NULL,
  UNIQUE (node_id, kind, resource_id)
);

-- Documents of a state upload that is not complete.
CREATE TABLE IF NOT EXISTS recovery_parts (
  node_id UUID NOT NULL,
  sha256 BYTEA NOT NULL,
  data BYTEA NOT NULL,
  PRIMARY KEY (node_id, sha256)
);
