-- Webhooks and the events that they could not deliver (hub/internal/webhook).
-- +goose NO TRANSACTION
-- +goose Up

CREATE TABLE IF NOT EXISTS webhooks (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL,
  project_id UUID,
  owner_type TEXT NOT NULL,
  owner_id UUID NOT NULL,
  url TEXT NOT NULL,
  description TEXT NOT NULL,
  types TEXT[] NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('active', 'disabled')),
  disabled_reason TEXT NOT NULL DEFAULT '',
  sealed_secret BYTEA NOT NULL,
  -- The secrets before, each sealed and with the end of its overlap; until then they sign as well.
  previous_secrets JSONB NOT NULL DEFAULT '[]',
  -- The last event that the webhook is done with; what follows is about the one after it.
  pos INT8 NOT NULL,
  tries INT4 NOT NULL DEFAULT 0,
  next_try_at TIMESTAMPTZ,
  failing_since TIMESTAMPTZ,
  last_error TEXT NOT NULL DEFAULT '',
  delivered_at TIMESTAMPTZ,
  resource_version INT8 NOT NULL DEFAULT 1,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL
);

CREATE INDEX IF NOT EXISTS webhooks_by_org ON webhooks (org_id, id);

CREATE TABLE IF NOT EXISTS webhook_dead_letters (
  webhook_id UUID NOT NULL,
  event_id UUID NOT NULL,
  pos INT8 NOT NULL,
  type TEXT NOT NULL,
  subject TEXT NOT NULL,
  tries INT4 NOT NULL,
  last_error TEXT NOT NULL,
  failed_at TIMESTAMPTZ NOT NULL,
  replaying BOOL NOT NULL DEFAULT FALSE,
  PRIMARY KEY (webhook_id, event_id)
);

CREATE INDEX IF NOT EXISTS webhook_dead_letters_by_event ON webhook_dead_letters (event_id);
