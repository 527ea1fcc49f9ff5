-- Documents that a node has brought while more of them are to come.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS recovery_parts (
    node_id UUID NOT NULL,
    sha256  BYTEA NOT NULL,
    data    BYTEA NOT NULL,
    PRIMARY KEY (node_id, sha256)
);

-- +goose Down
DROP TABLE IF EXISTS recovery_parts;
