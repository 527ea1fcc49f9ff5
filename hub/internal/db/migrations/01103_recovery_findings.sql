-- What contradicts the restored rows since the last restore; an admin looks at it.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS recovery_findings (
    id            UUID PRIMARY KEY,
    node_id       UUID NOT NULL,
    kind          TEXT NOT NULL,
    resource_type TEXT NOT NULL,
    resource_id   TEXT NOT NULL,
    detail        TEXT NOT NULL,
    found_at      TIMESTAMPTZ NOT NULL,
    UNIQUE (node_id, kind, resource_id)
);

-- +goose Down
DROP TABLE IF EXISTS recovery_findings;
