-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS member_revisions (
  member_id UUID NOT NULL,
  revision INT8 NOT NULL,
  -- protocol.Workload in protobuf with nothing but its services: frozen, so that a newer hub compiles the same bytes.
  services BYTEA NOT NULL,
  PRIMARY KEY (member_id, revision)
);
