-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS allocations (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL,
  project_id UUID NOT NULL,
  node_id UUID NOT NULL,
  -- Empty for a shape that was asked for piece by piece.
  sku TEXT NOT NULL,
  capacity_shape TEXT NOT NULL,
  accelerator_count INT8 NOT NULL,
  accelerator_model TEXT NOT NULL,
  cpu_cores INT8 NOT NULL,
  memory_mib INT8 NOT NULL,
  status TEXT NOT NULL,
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  resource_version INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  activated_at TIMESTAMPTZ,
  released_at TIMESTAMPTZ
);
