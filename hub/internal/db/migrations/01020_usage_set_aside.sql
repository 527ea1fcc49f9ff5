-- Segments that the database did not take, as the node signed them. The mark has passed them; each is a finding.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS usage_set_aside (
    node_id      UUID NOT NULL,
    incarnation  TEXT NOT NULL,
    number       INT8 NOT NULL,
    envelope     BYTEA NOT NULL,
    cause        TEXT NOT NULL,
    set_aside_at TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (node_id, incarnation, number)
);

-- +goose Down
DROP TABLE IF EXISTS usage_set_aside;
