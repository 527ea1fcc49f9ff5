-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS subjects (
  -- The member's or the allocation's id.
  id UUID PRIMARY KEY,
  kind TEXT NOT NULL CHECK (kind IN ('member', 'allocation')),
  org_id UUID NOT NULL,
  project_id UUID NOT NULL,
  app_instance_id UUID,
  app_slug TEXT NOT NULL,
  allocation_id UUID,
  node_id UUID NOT NULL,
  sku TEXT NOT NULL,
  operating_mode TEXT NOT NULL,
  control_plane_scope TEXT NOT NULL,
  runtime_backend TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  cpu_millis INT8 NOT NULL,
  memory_bytes INT8 NOT NULL,
  opened_at TIMESTAMPTZ NOT NULL,
  -- Above: frozen when the subject is made. Below: how far it has come.
  -- Empty until something with a price is leased or accrued.
  currency TEXT NOT NULL,
  -- The latest lease; 0 before the first.
  lease_no INT8 NOT NULL,
  renew_at TIMESTAMPTZ,
  -- Allocations: up to where the hub has measured.
  accrued_until TIMESTAMPTZ NOT NULL,
  closed_at TIMESTAMPTZ,
  -- The node's word that no more usage of a member follows.
  final_incarnation TEXT,
  final_sequence INT8,
  -- The hold has gone back to the wallet.
  settled_at TIMESTAMPTZ
);
