-- Nodes of which a restored hub still misses something. waiting: what it accepted; afterwards: usage up to owes_segment.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS recovering_nodes (
    node_id          UUID PRIMARY KEY,
    waiting          BOOL NOT NULL,
    owes_incarnation TEXT NOT NULL,
    owes_segment     INT8 NOT NULL,
    brought_at       TIMESTAMPTZ
);

-- +goose Down
DROP TABLE IF EXISTS recovering_nodes;
