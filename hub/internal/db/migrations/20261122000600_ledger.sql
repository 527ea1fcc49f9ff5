-- Metered subjects, prices, wallets, holds, leases, usage and the journal (hub/internal/ledger).
--
-- Keys of what usage posting reads and writes begin with the node: two transactions that post the usage of different
-- nodes at once must not meet on a page of an index, where PostgreSQL would take them for a conflict and abort one.
-- +goose NO TRANSACTION
-- +goose Up

CREATE TABLE IF NOT EXISTS subjects (
  -- The id of the member, allocation, volume or attachment.
  id UUID PRIMARY KEY,
  kind TEXT NOT NULL CHECK (kind IN ('member', 'allocation', 'volume', 'attachment')),
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
  accelerators INT8 NOT NULL,
  -- In how many slices the GPU is shared of which a member has one; 0 where it has its accelerators to itself.
  accelerator_slices INT8 NOT NULL DEFAULT 0,
  -- What a volume takes with its snapshots; changes with those.
  volume_bytes INT8 NOT NULL DEFAULT 0,
  opened_at TIMESTAMPTZ NOT NULL,
  -- Above: frozen when the subject is made. Below: how far it has come.
  -- Empty until something with a price is leased or accrued.
  currency TEXT NOT NULL,
  -- The latest lease; 0 before the first.
  lease_no INT8 NOT NULL,
  renew_at TIMESTAMPTZ,
  -- Allocations and volumes: up to where the hub has measured.
  accrued_until TIMESTAMPTZ NOT NULL,
  closed_at TIMESTAMPTZ,
  -- The node's word that no more usage of a member follows.
  final_incarnation TEXT,
  final_sequence INT8,
  -- The hold has gone back to the wallet.
  settled_at TIMESTAMPTZ,
  -- How often in a row a periodic pass could not process the row.
  failures INT8 NOT NULL DEFAULT 0,
  -- Until when such a row is set aside.
  retry_at TIMESTAMPTZ,
  -- Since when the member's node has said in each report that nothing of it runs; NULL while something does.
  idle_since TIMESTAMPTZ,
  -- When it said so last.
  idle_until TIMESTAMPTZ
);

CREATE INDEX IF NOT EXISTS subjects_by_node ON subjects (node_id) WHERE settled_at IS NULL;
CREATE INDEX IF NOT EXISTS subjects_by_renewal ON subjects (renew_at) WHERE closed_at IS NULL;
CREATE INDEX IF NOT EXISTS subjects_by_org ON subjects (org_id, id);
CREATE INDEX IF NOT EXISTS subjects_by_project ON subjects (project_id, id);
CREATE INDEX IF NOT EXISTS subjects_by_instance ON subjects (app_instance_id, id);
CREATE INDEX IF NOT EXISTS subjects_by_settlement ON subjects (id) WHERE settled_at IS NULL AND closed_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS subjects_by_held ON subjects (id) WHERE closed_at IS NULL AND kind <> 'member';
CREATE INDEX IF NOT EXISTS subjects_by_failure ON subjects (org_id) WHERE failures > 0;

-- The price book. Rows never change; one ends where the next of the same scope begins.
CREATE TABLE IF NOT EXISTS prices (
  id UUID PRIMARY KEY,
  meter TEXT NOT NULL,
  -- Empty: for every app, every SKU.
  app_slug TEXT NOT NULL,
  sku TEXT NOT NULL,
  currency TEXT NOT NULL,
  -- nanos of the currency buy per_quantity base units; per is how that was said.
  nanos INT8 NOT NULL CHECK (nanos >= 0),
  per TEXT NOT NULL,
  per_quantity INT8 NOT NULL CHECK (per_quantity > 0),
  host_basis_points INT8 NOT NULL CHECK (host_basis_points BETWEEN 0 AND 10000),
  from_at TIMESTAMPTZ NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);

CREATE UNIQUE INDEX IF NOT EXISTS prices_by_scope ON prices (meter, app_slug, sku, currency, from_at);

CREATE TABLE IF NOT EXISTS wallets (
  org_id UUID NOT NULL,
  currency TEXT NOT NULL,
  -- The sum of the entries of account wallet:<org_id>.
  balance_nanos INT8 NOT NULL CHECK (balance_nanos >= 0),
  created_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (org_id, currency)
);

CREATE TABLE IF NOT EXISTS holds (
  node_id UUID NOT NULL,
  subject_id UUID NOT NULL,
  id UUID NOT NULL,
  org_id UUID NOT NULL,
  currency TEXT NOT NULL,
  -- All three only grow; placed - posted - released is the sum of the entries of account hold:<id>.
  placed_nanos INT8 NOT NULL,
  posted_nanos INT8 NOT NULL,
  released_nanos INT8 NOT NULL,
  PRIMARY KEY (node_id, subject_id),
  CONSTRAINT holds_never_overdrawn CHECK (placed_nanos >= posted_nanos + released_nanos)
);

CREATE INDEX IF NOT EXISTS holds_by_org ON holds (org_id, currency);

CREATE TABLE IF NOT EXISTS leases (
  node_id UUID NOT NULL,
  subject_id UUID NOT NULL,
  lease_no INT8 NOT NULL,
  hold_id UUID NOT NULL,
  currency TEXT NOT NULL,
  cap_nanos INT8 NOT NULL,
  issued_at TIMESTAMPTZ NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  covered_since TIMESTAMPTZ NOT NULL,
  duration_seconds INT8 NOT NULL,
  end_policy TEXT NOT NULL,
  -- Frozen: [{meter, price_id, nanos, per_quantity, host_basis_points}].
  prices JSONB NOT NULL,
  PRIMARY KEY (node_id, subject_id, lease_no)
);

-- Leases that ended long ago (ledger.DeleteOldLeases).
CREATE INDEX IF NOT EXISTS leases_by_end ON leases (expires_at);

-- Which time of a subject is billed: joined intervals, over all incarnations of the node's store.
CREATE TABLE IF NOT EXISTS usage_coverage (
  node_id UUID NOT NULL,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  -- Empty for session_seconds, which counts once per member, whatever containers it has.
  run_id TEXT NOT NULL,
  from_at TIMESTAMPTZ NOT NULL,
  to_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (node_id, subject_id, meter, run_id, from_at)
);

-- What a node measured and nobody is billed for, with the reason. Rows never change.
CREATE TABLE IF NOT EXISTS suspense_records (
  node_id UUID NOT NULL,
  id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  sequence INT8 NOT NULL,
  -- As the node said; it may be the id of nothing.
  member_id TEXT NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  reason TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (node_id, id)
);

-- Old records (ledger.DeleteOldSuspense).
CREATE INDEX IF NOT EXISTS suspense_records_by_id ON suspense_records (id);
-- How many rows a node has written lately (ledger.withinBudget).
CREATE INDEX IF NOT EXISTS suspense_records_by_time ON suspense_records (node_id, created_at);

-- The journal. Rows never change; a correction is a new row that names the old one.
CREATE TABLE IF NOT EXISTS postings (
  id UUID PRIMARY KEY,
  -- Chosen by the poster: the same thing is never posted twice.
  key TEXT NOT NULL UNIQUE,
  kind TEXT NOT NULL,
  subject_kind TEXT NOT NULL,
  subject_id UUID NOT NULL,
  org_id UUID NOT NULL,
  project_id UUID,
  app_instance_id UUID,
  meter TEXT NOT NULL,
  price_id UUID,
  period_from TIMESTAMPTZ,
  period_to TIMESTAMPTZ,
  corrects UUID,
  description TEXT NOT NULL,
  correlation_id TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);

CREATE INDEX IF NOT EXISTS postings_by_org ON postings (org_id, id);
CREATE INDEX IF NOT EXISTS postings_by_project ON postings (project_id, id);
CREATE INDEX IF NOT EXISTS postings_by_instance ON postings (app_instance_id, id);

-- The legs of postings; those of one posting sum to zero in each currency. Rows never change.
CREATE TABLE IF NOT EXISTS entries (
  posting_id UUID NOT NULL,
  leg INT8 NOT NULL,
  account TEXT NOT NULL,
  currency TEXT NOT NULL,
  amount_nanos INT8 NOT NULL,
  PRIMARY KEY (posting_id, leg)
);

-- What was accepted of each subject, meter, price and UTC hour, and what was charged for it. Kept for good. price_id is
-- the nil UUID where the usage has no price.
CREATE TABLE IF NOT EXISTS usage_hours (
  node_id UUID NOT NULL,
  subject_id UUID NOT NULL,
  hour TIMESTAMPTZ NOT NULL,
  meter TEXT NOT NULL,
  price_id UUID NOT NULL,
  quantity INT8 NOT NULL,
  -- How many usage records began in the hour.
  records INT8 NOT NULL,
  -- round(price x quantity) = collected + written off.
  charged_nanos INT8 NOT NULL,
  collected_nanos INT8 NOT NULL,
  written_off_nanos INT8 NOT NULL,
  host_nanos INT8 NOT NULL,
  PRIMARY KEY (node_id, subject_id, hour, meter, price_id)
);

-- What usage has drawn from holds and the journal does not have yet: one posting to come for each subject, meter and
-- price.
CREATE TABLE IF NOT EXISTS pending_postings (
  node_id UUID NOT NULL,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  price_id UUID NOT NULL,
  -- The id that the posting will have.
  posting_id UUID NOT NULL,
  currency TEXT NOT NULL,
  from_hour TIMESTAMPTZ NOT NULL,
  to_hour TIMESTAMPTZ NOT NULL,
  collected_nanos INT8 NOT NULL,
  written_off_nanos INT8 NOT NULL,
  host_nanos INT8 NOT NULL,
  since TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (node_id, subject_id, meter, price_id)
);

CREATE INDEX IF NOT EXISTS pending_postings_by_time ON pending_postings (since, subject_id);

-- What of a member's usage is in suspense by its own node's measurement, without what was billed before. quantity is
-- bounded by what can have been measured, before_opening is that bound for the time before the member was opened here;
-- leased_quantity is what the latest lease's cap makes up for.
CREATE TABLE IF NOT EXISTS suspense_totals (
  node_id UUID NOT NULL,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  before_opening INT8 NOT NULL,
  leased_quantity INT8 NOT NULL,
  PRIMARY KEY (node_id, subject_id, meter)
);

-- What was measured and accepted while the slot was the current one (usage_slots). Whose it is, subjects say.
CREATE TABLE IF NOT EXISTS usage_records_0 (
  id UUID PRIMARY KEY,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  run_id TEXT NOT NULL,
  lease_no INT8 NOT NULL,
  posting_id UUID,
  UNIQUE (subject_id, id)
);

-- What was measured and accepted while the slot was the current one (usage_slots). Whose it is, subjects say.
CREATE TABLE IF NOT EXISTS usage_records_1 (
  id UUID PRIMARY KEY,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  run_id TEXT NOT NULL,
  lease_no INT8 NOT NULL,
  posting_id UUID,
  UNIQUE (subject_id, id)
);

-- What was measured and accepted while the slot was the current one (usage_slots). Whose it is, subjects say.
CREATE TABLE IF NOT EXISTS usage_records_2 (
  id UUID PRIMARY KEY,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  run_id TEXT NOT NULL,
  lease_no INT8 NOT NULL,
  posting_id UUID,
  UNIQUE (subject_id, id)
);

-- What was measured and accepted while the slot was the current one (usage_slots). Whose it is, subjects say.
CREATE TABLE IF NOT EXISTS usage_records_3 (
  id UUID PRIMARY KEY,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  run_id TEXT NOT NULL,
  lease_no INT8 NOT NULL,
  posting_id UUID,
  UNIQUE (subject_id, id)
);

-- What was measured and accepted while the slot was the current one (usage_slots). Whose it is, subjects say.
CREATE TABLE IF NOT EXISTS usage_records_4 (
  id UUID PRIMARY KEY,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  run_id TEXT NOT NULL,
  lease_no INT8 NOT NULL,
  posting_id UUID,
  UNIQUE (subject_id, id)
);

-- What was measured and accepted while the slot was the current one (usage_slots). Whose it is, subjects say.
CREATE TABLE IF NOT EXISTS usage_records_5 (
  id UUID PRIMARY KEY,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  run_id TEXT NOT NULL,
  lease_no INT8 NOT NULL,
  posting_id UUID,
  UNIQUE (subject_id, id)
);

-- What was measured and accepted while the slot was the current one (usage_slots). Whose it is, subjects say.
CREATE TABLE IF NOT EXISTS usage_records_6 (
  id UUID PRIMARY KEY,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  run_id TEXT NOT NULL,
  lease_no INT8 NOT NULL,
  posting_id UUID,
  UNIQUE (subject_id, id)
);

-- What was measured and accepted while the slot was the current one (usage_slots). Whose it is, subjects say.
CREATE TABLE IF NOT EXISTS usage_records_7 (
  id UUID PRIMARY KEY,
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  quantity INT8 NOT NULL,
  started_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ NOT NULL,
  run_id TEXT NOT NULL,
  lease_no INT8 NOT NULL,
  posting_id UUID,
  UNIQUE (subject_id, id)
);

-- The slots that hold something. The current one has the newest from_at; each of the others ends where the next begins.
CREATE TABLE IF NOT EXISTS usage_slots (
  slot INT8 PRIMARY KEY,
  from_at TIMESTAMPTZ NOT NULL
);

-- The raw usage of all slots, and what a release without slots has left, for operators and tests.
CREATE OR REPLACE VIEW usage_recent AS
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id
    FROM usage_records_0 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id
    FROM usage_records_1 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id
    FROM usage_records_2 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id
    FROM usage_records_3 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id
    FROM usage_records_4 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id
    FROM usage_records_5 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id
    FROM usage_records_6 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id
    FROM usage_records_7;

-- The segments of the slot's records, as their nodes signed them (protobuf of gpuaas.v1.Envelope).
CREATE TABLE IF NOT EXISTS usage_segments_0 (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  envelope BYTEA NOT NULL,
  PRIMARY KEY (node_id, incarnation, number)
);

-- The segments of the slot's records, as their nodes signed them (protobuf of gpuaas.v1.Envelope).
CREATE TABLE IF NOT EXISTS usage_segments_1 (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  envelope BYTEA NOT NULL,
  PRIMARY KEY (node_id, incarnation, number)
);

-- The segments of the slot's records, as their nodes signed them (protobuf of gpuaas.v1.Envelope).
CREATE TABLE IF NOT EXISTS usage_segments_2 (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  envelope BYTEA NOT NULL,
  PRIMARY KEY (node_id, incarnation, number)
);

-- The segments of the slot's records, as their nodes signed them (protobuf of gpuaas.v1.Envelope).
CREATE TABLE IF NOT EXISTS usage_segments_3 (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  envelope BYTEA NOT NULL,
  PRIMARY KEY (node_id, incarnation, number)
);

-- The segments of the slot's records, as their nodes signed them (protobuf of gpuaas.v1.Envelope).
CREATE TABLE IF NOT EXISTS usage_segments_4 (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  envelope BYTEA NOT NULL,
  PRIMARY KEY (node_id, incarnation, number)
);

-- The segments of the slot's records, as their nodes signed them (protobuf of gpuaas.v1.Envelope).
CREATE TABLE IF NOT EXISTS usage_segments_5 (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  envelope BYTEA NOT NULL,
  PRIMARY KEY (node_id, incarnation, number)
);

-- The segments of the slot's records, as their nodes signed them (protobuf of gpuaas.v1.Envelope).
CREATE TABLE IF NOT EXISTS usage_segments_6 (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  envelope BYTEA NOT NULL,
  PRIMARY KEY (node_id, incarnation, number)
);

-- The segments of the slot's records, as their nodes signed them (protobuf of gpuaas.v1.Envelope).
CREATE TABLE IF NOT EXISTS usage_segments_7 (
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  number INT8 NOT NULL,
  envelope BYTEA NOT NULL,
  PRIMARY KEY (node_id, incarnation, number)
);

-- The segments of a slot that was emptied, packed by store: evidence for the dispute window (ledger.UnpackSegments).
CREATE TABLE IF NOT EXISTS usage_archive (
  -- Of the slot: when its first segments were posted, and when those of the next one were.
  from_at TIMESTAMPTZ NOT NULL,
  to_at TIMESTAMPTZ NOT NULL,
  node_id UUID NOT NULL,
  incarnation TEXT NOT NULL,
  first_number INT8 NOT NULL,
  last_number INT8 NOT NULL,
  segments INT8 NOT NULL,
  records INT8 NOT NULL,
  -- Of the unpacked bytes.
  sha256 BYTEA NOT NULL,
  packed BYTEA NOT NULL,
  PRIMARY KEY (from_at, node_id, incarnation, first_number)
);
