-- Only the digest of the secret is kept. A used token names the node that it let in.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS join_tokens (
    id            UUID PRIMARY KEY,
    secret_sha256 BYTEA NOT NULL UNIQUE,
    site_id       UUID NOT NULL,
    description   TEXT NOT NULL,
    created_by    TEXT NOT NULL,
    created_at    TIMESTAMPTZ NOT NULL,
    expires_at    TIMESTAMPTZ NOT NULL,
    used_at       TIMESTAMPTZ,
    node_id       UUID
);

-- +goose Down
DROP TABLE IF EXISTS join_tokens;
