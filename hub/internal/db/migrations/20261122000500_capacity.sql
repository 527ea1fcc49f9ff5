-- Accelerators, SKUs, allocations and what is reserved of them (hub/internal/capacity).
-- +goose NO TRANSACTION
-- +goose Up

CREATE TABLE IF NOT EXISTS accelerators (
  node_id UUID NOT NULL,
  id TEXT NOT NULL,
  vendor TEXT NOT NULL,
  model TEXT NOT NULL,
  memory_bytes INT8 NOT NULL,
  -- As the node said last: ok, or what ails it; missing when the last report did not name it.
  health TEXT NOT NULL,
  first_seen_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  -- The bounded message of the protocol, as JSON.
  description JSONB NOT NULL DEFAULT '{}',
  -- Detects whether a report describes it otherwise, without reading the description.
  description_sha256 BYTEA NOT NULL DEFAULT ''::BYTEA,
  -- Id of the accelerator that this is a partition of; empty for a whole one.
  part_of TEXT NOT NULL DEFAULT '',
  -- A whole one that has partitions now: only those can be claimed.
  partitioned BOOL NOT NULL DEFAULT false,
  -- How this slice of a GPU is shared, mps or time_slices; empty where hardware keeps it apart.
  sharing TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (node_id, id)
);

CREATE INDEX IF NOT EXISTS accelerators_by_whole ON accelerators (node_id, part_of) WHERE part_of <> '';

-- The environments that nodes keep, as they reported last.
CREATE TABLE IF NOT EXISTS environments (
  node_id UUID NOT NULL,
  project_id UUID NOT NULL,
  digest TEXT NOT NULL,
  -- The bounded message of the protocol, as JSON, and the digest of its bytes, which detects a change.
  description JSONB NOT NULL,
  description_sha256 BYTEA NOT NULL,
  PRIMARY KEY (project_id, digest, node_id)
);

CREATE INDEX IF NOT EXISTS environments_by_node ON environments (node_id);

CREATE TABLE IF NOT EXISTS skus (
  slug TEXT PRIMARY KEY,
  capacity_shape TEXT NOT NULL,
  accelerator_model TEXT NOT NULL,
  accelerator_count INT8 NOT NULL,
  cpu_cores INT8 NOT NULL,
  memory_mib INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  -- Since when no new allocation may name it; NULL while one may.
  retired_at TIMESTAMPTZ
);

INSERT INTO skus (slug, capacity_shape, accelerator_model, accelerator_count, cpu_cores, memory_mib, created_at) VALUES
  ('cpu-1', 'gpu_slice', '', 0, 1, 1024, now()),
  ('cpu-2', 'gpu_slice', '', 0, 2, 4096, now()),
  ('cpu-4', 'gpu_slice', '', 0, 4, 8192, now())
ON CONFLICT (slug) DO NOTHING;

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

CREATE INDEX IF NOT EXISTS allocations_by_project ON allocations (project_id, id);
CREATE INDEX IF NOT EXISTS allocations_by_node ON allocations (node_id) WHERE released_at IS NULL;
CREATE INDEX IF NOT EXISTS allocations_by_org ON allocations (org_id) WHERE released_at IS NULL;

-- The SSH keys of an allocation: a set of its operators and one of its apps. keys is a list of capacity.SSHKey.
CREATE TABLE IF NOT EXISTS ssh_key_sets (
  allocation_id UUID NOT NULL,
  managed_by TEXT NOT NULL CHECK (managed_by IN ('operator', 'app')),
  org_slug TEXT NOT NULL,
  keys JSONB NOT NULL,
  resource_version INT8 NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (allocation_id, managed_by)
);

CREATE TABLE IF NOT EXISTS claims (
  allocation_id UUID NOT NULL,
  node_id UUID NOT NULL,
  accelerator_id TEXT NOT NULL,
  claimed_at TIMESTAMPTZ NOT NULL,
  released_at TIMESTAMPTZ,
  PRIMARY KEY (allocation_id, accelerator_id)
);

CREATE UNIQUE INDEX IF NOT EXISTS claims_active ON claims (node_id, accelerator_id) WHERE released_at IS NULL;

CREATE TABLE IF NOT EXISTS reservations (
  member_id UUID PRIMARY KEY,
  allocation_id UUID NOT NULL,
  cpu_millis INT8 NOT NULL,
  memory_bytes INT8 NOT NULL,
  reserved_at TIMESTAMPTZ NOT NULL,
  freed_at TIMESTAMPTZ
);

CREATE INDEX IF NOT EXISTS reservations_by_allocation ON reservations (allocation_id) WHERE freed_at IS NULL;

CREATE TABLE IF NOT EXISTS reserved_accelerators (
  member_id UUID NOT NULL,
  allocation_id UUID NOT NULL,
  node_id UUID NOT NULL,
  accelerator_id TEXT NOT NULL,
  freed_at TIMESTAMPTZ,
  PRIMARY KEY (member_id, accelerator_id)
);

CREATE UNIQUE INDEX IF NOT EXISTS reserved_accelerators_active ON reserved_accelerators (node_id, accelerator_id)
  WHERE freed_at IS NULL;

-- Ports of nodes that tenants chose; each has one member.
CREATE TABLE IF NOT EXISTS reserved_ports (
  node_id UUID NOT NULL,
  port INT8 NOT NULL,
  member_id UUID NOT NULL,
  allocation_id UUID NOT NULL,
  PRIMARY KEY (node_id, port)
);

CREATE INDEX IF NOT EXISTS reserved_ports_by_member ON reserved_ports (member_id);

-- Volumes of projects, each bound to one node. Volumes of app instances are the nodes' alone.
CREATE TABLE IF NOT EXISTS volumes (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL,
  project_id UUID NOT NULL,
  node_id UUID NOT NULL,
  name TEXT NOT NULL,
  size_bytes INT8 NOT NULL CHECK (size_bytes >= 16777216),
  -- What the node has made of it.
  made_bytes INT8 NOT NULL DEFAULT 0,
  status TEXT NOT NULL,
  -- What keeps it from being ready or deleted, as the node said last.
  status_reason TEXT NOT NULL DEFAULT '',
  detail TEXT NOT NULL DEFAULT '',
  -- Number and source of the last restore.
  restore_no INT8 NOT NULL DEFAULT 0,
  restore_snapshot_id TEXT NOT NULL DEFAULT '',
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  resource_version INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  -- When the node first had it.
  ready_at TIMESTAMPTZ,
  -- When it was deleted, or its node lost.
  deleted_at TIMESTAMPTZ
);

CREATE UNIQUE INDEX IF NOT EXISTS volumes_by_name ON volumes (project_id, name) WHERE deleted_at IS NULL;
CREATE INDEX IF NOT EXISTS volumes_by_project ON volumes (project_id, id);
CREATE INDEX IF NOT EXISTS volumes_by_node ON volumes (node_id) WHERE deleted_at IS NULL;
CREATE INDEX IF NOT EXISTS volumes_by_org ON volumes (org_id) WHERE deleted_at IS NULL;

CREATE TABLE IF NOT EXISTS volume_snapshots (
  id UUID PRIMARY KEY,
  volume_id UUID NOT NULL,
  description TEXT NOT NULL,
  size_bytes INT8 NOT NULL,
  status TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  resource_version INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  deleted_at TIMESTAMPTZ
);

CREATE INDEX IF NOT EXISTS volume_snapshots_by_volume ON volume_snapshots (volume_id) WHERE deleted_at IS NULL;

-- The members that have a volume; at most one of them writes.
CREATE TABLE IF NOT EXISTS reserved_volumes (
  volume_id UUID NOT NULL,
  member_id UUID NOT NULL,
  allocation_id UUID NOT NULL,
  read_only BOOL NOT NULL,
  PRIMARY KEY (volume_id, member_id)
);

CREATE UNIQUE INDEX IF NOT EXISTS reserved_volumes_writer ON reserved_volumes (volume_id) WHERE NOT read_only;
CREATE INDEX IF NOT EXISTS reserved_volumes_by_member ON reserved_volumes (member_id);
