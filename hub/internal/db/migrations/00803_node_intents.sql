-- rev grows with every command that touches the node; a generation is saved only if it is still the one that was compiled.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS node_intents (
    node_id UUID PRIMARY KEY,
    rev     INT8 NOT NULL
);

-- +goose Down
DROP TABLE IF EXISTS node_intents;
