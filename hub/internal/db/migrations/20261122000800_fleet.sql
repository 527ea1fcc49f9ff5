-- Nodes, sites and sessions (hub/internal/fleet).
-- +goose NO TRANSACTION
-- +goose Up

-- Nodes that share a LAN and a gossip key.
CREATE TABLE IF NOT EXISTS sites (
  id UUID PRIMARY KEY,
  slug TEXT NOT NULL UNIQUE,
  name TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);

-- public_key is the node's own Ed25519 key and never changes: another key is another node.
-- incarnation, accepted_* and bundle_version are of the node's last hello or ack; they detect a store that fell behind.
CREATE TABLE IF NOT EXISTS nodes (
  id UUID PRIMARY KEY,
  site_id UUID NOT NULL,
  hostname TEXT NOT NULL,
  public_key BYTEA NOT NULL UNIQUE,
  resource_version INT8 NOT NULL,
  draining BOOL NOT NULL DEFAULT false,
  banned_at TIMESTAMPTZ,
  ban_reason TEXT NOT NULL DEFAULT '',
  certificate_expires_at TIMESTAMPTZ NOT NULL,
  incarnation TEXT NOT NULL DEFAULT '',
  accepted_epoch INT8 NOT NULL DEFAULT 0,
  accepted_generation INT8 NOT NULL DEFAULT 0,
  bundle_version INT8 NOT NULL DEFAULT 0,
  agent_version TEXT NOT NULL DEFAULT '',
  protocol_version INT8 NOT NULL DEFAULT 0,
  features JSONB NOT NULL,
  facts JSONB NOT NULL,
  conditions JSONB NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  -- NULL where the node is not quarantined.
  quarantined_at TIMESTAMPTZ,
  quarantine_reason TEXT NOT NULL DEFAULT '',
  -- Incarnations that said hello while the node was quarantined, newest last: a store with one of them must take a new
  -- one.
  suspect_incarnations JSONB NOT NULL DEFAULT '[]',
  -- When an admin removed the node for good.
  removed_at TIMESTAMPTZ,
  -- Whether it was out of contact when it was removed, so that its workloads ended without proof.
  lost BOOL NOT NULL DEFAULT false,
  remove_reason TEXT NOT NULL DEFAULT '',
  -- Copies of the facts that placement needs.
  cpu_cores INT8 NOT NULL DEFAULT 0,
  -- As nodes.cpu_cores.
  memory_bytes INT8 NOT NULL DEFAULT 0,
  -- Detects whether a hello has other facts, without reading them.
  facts_sha256 BYTEA NOT NULL DEFAULT ''::BYTEA,
  -- What a restored hub still needs from the node: 'awaiting' its accepted state, then 'usage_owed' up to owed_segment.
  resync TEXT NOT NULL DEFAULT '',
  owed_incarnation TEXT NOT NULL DEFAULT '',
  owed_segment INT8 NOT NULL DEFAULT 0,
  -- Whether the node's members count as reachable; it follows the contact with a delay. It is here and not with the
  -- session, which every report changes: who places a member reads it.
  reachable BOOL NOT NULL DEFAULT false
);

-- Only the digest of the secret is stored. A used token names the node that it enrolled.
CREATE TABLE IF NOT EXISTS join_tokens (
  id UUID PRIMARY KEY,
  secret_sha256 BYTEA NOT NULL UNIQUE,
  site_id UUID NOT NULL,
  description TEXT NOT NULL,
  created_by TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  used_at TIMESTAMPTZ,
  node_id UUID
);

-- rev grows with every change of the node's desired state. A state is saved only if rev is still the one that it was
-- compiled from.
CREATE TABLE IF NOT EXISTS node_intents (
  node_id UUID PRIMARY KEY,
  rev INT8 NOT NULL,
  -- W3C trace context of the change that made this revision; empty where there was none.
  traceparent TEXT NOT NULL DEFAULT ''
);

-- The current connection of a node. A report with a counter that is not above report_counter is outdated.
CREATE TABLE IF NOT EXISTS node_sessions (
  node_id UUID PRIMARY KEY,
  session_no INT8 NOT NULL,
  replica_id TEXT NOT NULL,
  report_counter INT8 NOT NULL,
  connected_at TIMESTAMPTZ NOT NULL,
  seen_at TIMESTAMPTZ NOT NULL,
  disconnected_at TIMESTAMPTZ,
  -- The session before this one that the agent process reports in its hello; 0 for a new process.
  last_session INT8 NOT NULL DEFAULT 0,
  -- The newest session with an applied report; 0 for none since the last release from quarantine.
  reported_session INT8 NOT NULL DEFAULT 0
);

-- Documents that a node refused; only the newest few of each node are kept.
CREATE TABLE IF NOT EXISTS node_refusals (
  node_id UUID NOT NULL,
  id UUID NOT NULL,
  document TEXT NOT NULL,
  epoch INT8 NOT NULL,
  generation INT8 NOT NULL,
  reason TEXT NOT NULL,
  detail TEXT NOT NULL,
  at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (node_id, id)
);
