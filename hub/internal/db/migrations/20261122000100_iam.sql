-- Orgs, projects, people, service accounts and their keys (hub/internal/iam).
-- +goose NO TRANSACTION
-- +goose Up

CREATE TABLE IF NOT EXISTS orgs (
  id UUID PRIMARY KEY,
  slug TEXT NOT NULL UNIQUE,
  name TEXT NOT NULL,
  resource_version INT8 NOT NULL DEFAULT 1,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE IF NOT EXISTS projects (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL REFERENCES orgs (id),
  slug TEXT NOT NULL,
  name TEXT NOT NULL,
  resource_version INT8 NOT NULL DEFAULT 1,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  UNIQUE (org_id, slug)
);

-- Where the environments of a project get their packages from.
CREATE TABLE IF NOT EXISTS package_indexes (
  project_id UUID PRIMARY KEY REFERENCES projects (id),
  -- Without credentials.
  url TEXT NOT NULL,
  username TEXT NOT NULL,
  -- Certificates of the project are in sealed_url.
  own_ca BOOL NOT NULL,
  -- The URL with its credentials, and certificates, sealed with the hub's key-encryption key.
  sealed_url BYTEA NOT NULL,
  resource_version INT8 NOT NULL DEFAULT 1,
  updated_at TIMESTAMPTZ NOT NULL
);

CREATE TABLE IF NOT EXISTS users (
  id UUID PRIMARY KEY,
  org_id UUID REFERENCES orgs (id),
  email TEXT NOT NULL UNIQUE,
  name TEXT NOT NULL,
  platform_admin BOOL NOT NULL,
  resource_version INT8 NOT NULL DEFAULT 1,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  disabled_at TIMESTAMPTZ,
  -- The row of a removed user stays, because events and audit rows name it; its address is given up.
  removed_at TIMESTAMPTZ,
  CHECK (org_id IS NOT NULL OR platform_admin)
);

CREATE INDEX IF NOT EXISTS users_by_org ON users (org_id, id) WHERE removed_at IS NULL;
CREATE INDEX IF NOT EXISTS users_platform_admins ON users (created_at, id) WHERE platform_admin;

-- Roles that an org has made of permission keys.
CREATE TABLE IF NOT EXISTS custom_roles (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL REFERENCES orgs (id),
  slug TEXT NOT NULL,
  name TEXT NOT NULL,
  description TEXT NOT NULL,
  permissions TEXT[] NOT NULL,
  resource_version INT8 NOT NULL DEFAULT 1,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  UNIQUE (org_id, slug)
);

CREATE TABLE IF NOT EXISTS role_bindings (
  user_id UUID NOT NULL REFERENCES users (id),
  -- Name of a role, or id of a custom one, which is in custom_role_id then.
  role TEXT NOT NULL,
  custom_role_id UUID REFERENCES custom_roles (id),
  scope TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (user_id, role, scope)
);

CREATE INDEX IF NOT EXISTS role_bindings_by_scope ON role_bindings (scope, user_id);
CREATE INDEX IF NOT EXISTS role_bindings_by_custom_role ON role_bindings (custom_role_id)
  WHERE custom_role_id IS NOT NULL;

CREATE TABLE IF NOT EXISTS user_tokens (
  id UUID PRIMARY KEY,
  user_id UUID NOT NULL REFERENCES users (id),
  hash BYTEA NOT NULL UNIQUE,
  description TEXT NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  revoked_at TIMESTAMPTZ,
  created_at TIMESTAMPTZ NOT NULL
);

CREATE INDEX IF NOT EXISTS user_tokens_user ON user_tokens (user_id);

CREATE TABLE IF NOT EXISTS service_accounts (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL REFERENCES orgs (id),
  project_id UUID NOT NULL REFERENCES projects (id),
  slug TEXT NOT NULL,
  name TEXT NOT NULL,
  description TEXT NOT NULL,
  role TEXT NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('active', 'disabled')),
  resource_version INT8 NOT NULL DEFAULT 1,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  deleted_at TIMESTAMPTZ
);

CREATE UNIQUE INDEX IF NOT EXISTS service_accounts_slug ON service_accounts (project_id, slug) WHERE deleted_at IS NULL;
CREATE INDEX IF NOT EXISTS service_accounts_by_org ON service_accounts (org_id) WHERE deleted_at IS NULL;

CREATE TABLE IF NOT EXISTS service_account_keys (
  id UUID PRIMARY KEY,
  service_account_id UUID NOT NULL REFERENCES service_accounts (id),
  public_key BYTEA NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  revoked_at TIMESTAMPTZ
);

CREATE INDEX IF NOT EXISTS service_account_keys_account ON service_account_keys (service_account_id);

CREATE TABLE IF NOT EXISTS service_account_assertions (
  service_account_id UUID NOT NULL REFERENCES service_accounts (id),
  jti TEXT NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (service_account_id, jti)
);

CREATE TABLE IF NOT EXISTS iam_signing_keys (
  id UUID PRIMARY KEY,
  public_key BYTEA NOT NULL,
  sealed_private_key BYTEA NOT NULL,
  created_at TIMESTAMPTZ NOT NULL
);

-- Limits that an admin has set for an org; a name without a row has the default of the hub's release.
CREATE TABLE IF NOT EXISTS org_quotas (
  org_id UUID NOT NULL REFERENCES orgs (id),
  name TEXT NOT NULL,
  max_value INT8 NOT NULL CHECK (max_value >= 0),
  updated_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (org_id, name)
);
