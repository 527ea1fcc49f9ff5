-- App instances, their members, revisions and operations (hub/internal/instance).
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
  -- The desired revision; its content is in instance_revisions.
  revision INT8 NOT NULL,
  placement_allocation_ids JSONB NOT NULL,
  hint_results JSONB NOT NULL,
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  -- Grows by one with each event of the instance.
  resource_version INT8 NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  activated_at TIMESTAMPTZ,
  history_deleted BOOL NOT NULL DEFAULT false,
  -- NULL until the instance is decommissioned. Indexes refer to this column and not to those that change all the time:
  -- PostgreSQL writes to all indexes of a row when one of their columns changes.
  decommissioned_at TIMESTAMPTZ GENERATED ALWAYS AS (CASE WHEN status = 'decommissioned' THEN updated_at END) STORED
) WITH (fillfactor = 80);

CREATE INDEX IF NOT EXISTS app_instances_by_project ON app_instances (project_id, id);
-- Decommissioned instances whose operations and revisions are not deleted yet (instance.DeleteHistory).
CREATE INDEX IF NOT EXISTS app_instances_with_history ON app_instances (decommissioned_at)
  WHERE decommissioned_at IS NOT NULL AND NOT history_deleted;

-- The instances of each org that are not decommissioned, to be counted: counting app_instances, each creation would
-- conflict with every report, which updates one of them.
CREATE TABLE IF NOT EXISTS live_instances (
  org_id UUID NOT NULL,
  instance_id UUID NOT NULL,
  PRIMARY KEY (org_id, instance_id)
);

CREATE TABLE IF NOT EXISTS instance_revisions (
  instance_id UUID NOT NULL,
  revision INT8 NOT NULL,
  app_version TEXT NOT NULL,
  parameters TEXT NOT NULL,
  -- The one part that a tenant may change without a new revision.
  config TEXT NOT NULL,
  -- What the tenant chose (manifest.Choice).
  resources JSONB NOT NULL DEFAULT '{}',
  -- protocol.Envelope in protobuf, frozen with the revision.
  manifest_envelope BYTEA NOT NULL,
  delegation_envelope BYTEA NOT NULL,
  features JSONB NOT NULL,
  readiness_timeout_ms INT8 NOT NULL,
  correlation_id TEXT NOT NULL,
  -- W3C trace context of the request; empty where there was none.
  traceparent TEXT NOT NULL DEFAULT '',
  created_at TIMESTAMPTZ NOT NULL,
  -- The target of a rollback without a version; 0 if there is none.
  previous_revision INT8 NOT NULL DEFAULT 0,
  -- The revision to which the node rolls back during the upgrade; 0 if there is none.
  fallback_revision INT8 NOT NULL DEFAULT 0,
  -- The tenant returned to app_version: nodes restore the volumes that they kept when it was left.
  rolls_back BOOL NOT NULL DEFAULT FALSE,
  -- When the content of the revision was first ready; NULL before.
  ready_at TIMESTAMPTZ,
  -- Since when the revision is no longer needed (instance.supersede); NULL while it is.
  superseded_at TIMESTAMPTZ,
  PRIMARY KEY (instance_id, revision)
) WITH (fillfactor = 80);

-- Revisions that are kept for their retention only (instance.DeleteOldRevisions).
CREATE INDEX IF NOT EXISTS instance_revisions_superseded ON instance_revisions (superseded_at)
  WHERE superseded_at IS NOT NULL;

CREATE TABLE IF NOT EXISTS instance_members (
  id UUID PRIMARY KEY,
  instance_id UUID NOT NULL,
  allocation_id UUID NOT NULL,
  node_id UUID NOT NULL,
  role TEXT NOT NULL,
  -- An external worker operates the member, and not the agent of its node.
  external BOOL NOT NULL DEFAULT false,
  -- When the worker last reported the member.
  heartbeat_at TIMESTAMPTZ,
  status TEXT NOT NULL,
  status_reason TEXT NOT NULL,
  detail TEXT NOT NULL,
  -- The revision of the status; 0 before the first report.
  observed_revision INT8 NOT NULL,
  unreachable BOOL NOT NULL,
  endpoints JSONB NOT NULL,
  restarts INT8 NOT NULL,
  exit_code INT8 NOT NULL,
  started_at TIMESTAMPTZ,
  ready_at TIMESTAMPTZ,
  exited_at TIMESTAMPTZ,
  -- The first signed state without the member, once its removal is requested.
  absent_epoch INT8,
  absent_generation INT8,
  -- protocol.RemovalProof in protobuf; empty where no node ever ran the member.
  removal_proof BYTEA,
  removed_at TIMESTAMPTZ,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  -- The revision that the node rolled back from, to the observed one; 0 if it did not.
  fallback_from_revision INT8 NOT NULL DEFAULT 0,
  -- The node's incarnation at the last report on the member; empty before one.
  observed_incarnation TEXT NOT NULL DEFAULT '',
  -- The signed refusal of the node's owner, where that is why the member does not run.
  owner_refusal BYTEA,
  -- SHA-256 of the config that the member's containers have; NULL where they run none or have several.
  config_sha256 BYTEA,
  -- The statuses of the services (instance.ServiceStatus); empty for a member of one service.
  services JSONB NOT NULL DEFAULT '[]',
  -- When the node first reported the member's failure; NULL while it has not failed.
  failing_since TIMESTAMPTZ,
  -- A later report repeated the failure: only then may it end the instance.
  failure_confirmed BOOL NOT NULL DEFAULT false
) WITH (fillfactor = 80);

CREATE INDEX IF NOT EXISTS instance_members_by_instance ON instance_members (instance_id);
CREATE INDEX IF NOT EXISTS instance_members_by_node ON instance_members (node_id) WHERE removed_at IS NULL;
-- Members whose external worker may be silent (instance.SilentMembers).
CREATE INDEX IF NOT EXISTS instance_members_external ON instance_members (heartbeat_at) WHERE external;

CREATE TABLE IF NOT EXISTS member_revisions (
  member_id UUID NOT NULL,
  revision INT8 NOT NULL,
  -- protocol.Workload in protobuf with nothing but its services: frozen, so that a newer hub compiles the same bytes.
  services BYTEA NOT NULL,
  PRIMARY KEY (member_id, revision)
);

CREATE TABLE IF NOT EXISTS instance_operations (
  id UUID PRIMARY KEY,
  instance_id UUID NOT NULL,
  kind TEXT NOT NULL,
  revision INT8 NOT NULL,
  status TEXT NOT NULL,
  reason TEXT NOT NULL,
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  -- W3C trace context of the request; empty where there was none.
  traceparent TEXT NOT NULL DEFAULT '',
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ,
  -- Since when the instance has a later operation; NULL while this is its latest.
  superseded_at TIMESTAMPTZ
) WITH (fillfactor = 80);

CREATE INDEX IF NOT EXISTS instance_operations_by_instance ON instance_operations (instance_id, id);
-- Superseded operations (instance.DeleteOldOperations).
CREATE INDEX IF NOT EXISTS instance_operations_superseded ON instance_operations (superseded_at)
  WHERE superseded_at IS NOT NULL;

-- What an external worker is to do for an instance, one after the other in the order of the ids.
CREATE TABLE IF NOT EXISTS instance_tasks (
  id UUID PRIMARY KEY,
  instance_id UUID NOT NULL,
  -- NULL for a task that concerns all members.
  member_id UUID,
  kind TEXT NOT NULL,
  revision INT8 NOT NULL,
  phases JSONB NOT NULL,
  phase TEXT NOT NULL DEFAULT '',
  detail TEXT NOT NULL DEFAULT '',
  state TEXT NOT NULL,
  status_reason TEXT NOT NULL DEFAULT '',
  -- The fencing token: grows with each claim by another worker.
  attempt INT8 NOT NULL DEFAULT 0,
  worker TEXT NOT NULL DEFAULT '',
  held_by_type TEXT NOT NULL DEFAULT '',
  held_by_id TEXT NOT NULL DEFAULT '',
  lease_ms INT8 NOT NULL DEFAULT 0,
  lease_expires_at TIMESTAMPTZ,
  not_before TIMESTAMPTZ,
  cancel_requested BOOL NOT NULL DEFAULT false,
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  -- W3C trace context of the request that the task follows from; empty where it had none.
  traceparent TEXT NOT NULL DEFAULT '',
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ
);

CREATE INDEX IF NOT EXISTS instance_tasks_by_instance ON instance_tasks (instance_id, id);

-- Projects that use an instance of another project of their org.
CREATE TABLE IF NOT EXISTS instance_attachments (
  id UUID PRIMARY KEY,
  instance_id UUID NOT NULL,
  org_id UUID NOT NULL,
  owner_project_id UUID NOT NULL,
  -- The attached project.
  project_id UUID NOT NULL,
  requested_by_type TEXT NOT NULL,
  requested_by_id TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  UNIQUE (instance_id, project_id)
);

CREATE INDEX IF NOT EXISTS instance_attachments_by_project ON instance_attachments (project_id, id);

CREATE TABLE IF NOT EXISTS instance_reports (
  node_id UUID PRIMARY KEY,
  session_no INT8 NOT NULL,
  counter INT8 NOT NULL,
  reported_at TIMESTAMPTZ NOT NULL
);
