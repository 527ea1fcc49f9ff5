-- For each store of a node: every segment up to number is posted. sha256 is of the payload of segment number. Kept for ever,
-- so that a segment is posted once however late it is sent again.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS usage_marks (
    node_id     UUID NOT NULL,
    incarnation TEXT NOT NULL,
    number      INT8 NOT NULL,
    sha256      BYTEA NOT NULL,
    updated_at  TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (node_id, incarnation)
);

-- +goose Down
DROP TABLE IF EXISTS usage_marks;
