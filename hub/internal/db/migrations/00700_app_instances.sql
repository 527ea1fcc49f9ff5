-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS app_instances (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL,
  org_slug TEXT NOT NULL,
  project_id UUID NOT NULL,
  app_slug TEXT NOT NULL,
  display_name TEXT NOT NULL,
  status TEXT NOT NULL,
  status_reason TEXT NOT NULL,
  health TEXT NOT NULL,
  operating_mode TEXT NOT NULL,
  control_plane_scope TEXT NOT NULL,
  runtime_backend TEXT NOT NULL,
  tenant_boundary_mode TEXT NOT NULL,
  -- The wanted revision; its content is in instance_revisions.
  revision INT8 NOT NULL,
  placement_allocation_ids JSONB NOT NULL,
  config TEXT NOT NULL,
  hint_results JSONB NOT NULL,
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  -- Grows by one with each event of the instance.
  resource_version INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  activated_at TIMESTAMPTZ
);
