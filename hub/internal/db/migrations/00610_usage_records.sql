-- +goose NO TRANSACTION
-- +goose Up
-- What was measured and accepted. Rows never change.
CREATE TABLE IF NOT EXISTS usage_records (
  id UUID PRIMARY KEY,
  subject_id UUID NOT NULL,
  org_id UUID NOT NULL,
  project_id UUID NOT NULL,
  app_instance_id UUID,
  node_id UUID NOT NULL,
  -- Where the node numbered it; NULL for what the hub measured itself.
  incarnation TEXT,
  sequence INT8,
  usage_source TEXT NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  -- As the node said; what is above quantity is in suspense_records.
  measured_quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  revision INT8 NOT NULL,
  run_id TEXT NOT NULL,
  lease_no INT8 NOT NULL,
  posting_id UUID,
  created_at TIMESTAMPTZ NOT NULL
);
