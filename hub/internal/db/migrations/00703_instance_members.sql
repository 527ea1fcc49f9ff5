-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS instance_members (
  id UUID PRIMARY KEY,
  instance_id UUID NOT NULL,
  allocation_id UUID NOT NULL,
  node_id UUID NOT NULL,
  role TEXT NOT NULL,
  status TEXT NOT NULL,
  status_reason TEXT NOT NULL,
  detail TEXT NOT NULL,
  -- The revision that the status is about; 0 while the node has said nothing.
  observed_revision INT8 NOT NULL,
  unreachable BOOL NOT NULL,
  endpoints JSONB NOT NULL,
  restarts INT8 NOT NULL,
  exit_code INT8 NOT NULL,
  started_at TIMESTAMPTZ,
  ready_at TIMESTAMPTZ,
  exited_at TIMESTAMPTZ,
  -- First signed state without the member, once it is not wanted any more.
  absent_epoch INT8,
  absent_generation INT8,
  -- protocol.RemovalProof in protobuf; empty where no node ever held the member.
  removal_proof BYTEA,
  removed_at TIMESTAMPTZ,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL
);
