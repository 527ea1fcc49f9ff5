-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS instance_revisions (
  instance_id UUID NOT NULL,
  revision INT8 NOT NULL,
  app_version TEXT NOT NULL,
  parameters TEXT NOT NULL,
  -- protocol.Envelope in protobuf, frozen with the revision.
  manifest_envelope BYTEA NOT NULL,
  delegation_envelope BYTEA NOT NULL,
  features JSONB NOT NULL,
  readiness_timeout_ms INT8 NOT NULL,
  correlation_id TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (instance_id, revision)
);
