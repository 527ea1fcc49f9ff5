-- Which connection of a node counts. report_counter guards against late reports: lower loses. reachable is what others were
-- told last; it follows silence and contact with some patience.
-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS node_sessions (
    node_id         UUID PRIMARY KEY,
    session_no      INT8 NOT NULL,
    replica_id      TEXT NOT NULL,
    report_counter  INT8 NOT NULL,
    connected_at    TIMESTAMPTZ NOT NULL,
    seen_at         TIMESTAMPTZ NOT NULL,
    reachable       BOOL NOT NULL,
    disconnected_at TIMESTAMPTZ
);

-- +goose Down
DROP TABLE IF EXISTS node_sessions;
