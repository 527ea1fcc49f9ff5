-- public_key is the node's own Ed25519 key and never changes: another key is another node.
-- incarnation, accepted_* and bundle_version are what the node itself said last; they tell a store that fell behind.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS nodes (
    id                     UUID PRIMARY KEY,
    site_id                UUID NOT NULL,
    hostname               TEXT NOT NULL,
    public_key             BYTEA NOT NULL UNIQUE,
    resource_version       INT8 NOT NULL,
    draining               BOOL NOT NULL DEFAULT false,
    banned_at              TIMESTAMPTZ,
    ban_reason             TEXT NOT NULL DEFAULT '',
    certificate_expires_at TIMESTAMPTZ NOT NULL,
    incarnation            TEXT NOT NULL DEFAULT '',
    accepted_epoch         INT8 NOT NULL DEFAULT 0,
    accepted_generation    INT8 NOT NULL DEFAULT 0,
    bundle_version         INT8 NOT NULL DEFAULT 0,
    agent_version          TEXT NOT NULL DEFAULT '',
    protocol_version       INT8 NOT NULL DEFAULT 0,
    features               JSONB NOT NULL,
    facts                  JSONB NOT NULL,
    conditions             JSONB NOT NULL,
    created_at             TIMESTAMPTZ NOT NULL,
    updated_at             TIMESTAMPTZ NOT NULL
);

-- +goose Down
DROP TABLE IF EXISTS nodes;
