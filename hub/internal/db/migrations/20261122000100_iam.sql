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
  -- What the platform manages runs in the allocations of this project.
  platform BOOL NOT NULL DEFAULT false,
  resource_version INT8 NOT NULL DEFAULT 1,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  UNIQUE (org_id, slug)
);

-- A platform has one project at most.
CREATE UNIQUE INDEX IF NOT EXISTS projects_platform ON projects (platform) WHERE platform;

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

-- What people log in with at the hub itself.
CREATE TABLE IF NOT EXISTS user_passwords (
  user_id UUID PRIMARY KEY REFERENCES users (id),
  -- PHC string of Argon2id.
  password_hash TEXT NOT NULL,
  -- Sealed with the hub's key-encryption key; NULL without one-time codes.
  sealed_totp_secret BYTEA,
  -- Time step of the newest code that was used: it and older ones do not count again.
  totp_step INT8 NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL
);

-- People as OpenID Connect providers know them.
CREATE TABLE IF NOT EXISTS user_identities (
  issuer TEXT NOT NULL,
  subject TEXT NOT NULL,
  user_id UUID NOT NULL REFERENCES users (id),
  created_at TIMESTAMPTZ NOT NULL,
  PRIMARY KEY (issuer, subject)
);

CREATE INDEX IF NOT EXISTS user_identities_user ON user_identities (user_id);

-- Logins at an identity provider that are under way; minutes.
CREATE TABLE IF NOT EXISTS external_logins (
  handle_hash BYTEA PRIMARY KEY,
  sealed_secret BYTEA NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL
);

-- Logins. Of the refresh tokens the SHA-256 is kept: of the part that they share, and of the newest one as a whole.
CREATE TABLE IF NOT EXISTS sessions (
  id UUID PRIMARY KEY,
  user_id UUID NOT NULL REFERENCES users (id),
  family_hash BYTEA NOT NULL UNIQUE,
  refresh_hash BYTEA NOT NULL,
  user_agent TEXT NOT NULL,
  source_address TEXT NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  refreshed_at TIMESTAMPTZ NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  revoked_at TIMESTAMPTZ
);

CREATE INDEX IF NOT EXISTS sessions_user ON sessions (user_id, id);

CREATE TABLE IF NOT EXISTS invitations (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL REFERENCES orgs (id),
  email TEXT NOT NULL,
  -- Names of roles and ids of custom ones, to be held in the whole org.
  roles TEXT[] NOT NULL,
  hash BYTEA NOT NULL UNIQUE,
  invited_by UUID NOT NULL REFERENCES users (id),
  created_at TIMESTAMPTZ NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  -- Accepted or revoked.
  ended_at TIMESTAMPTZ
);

CREATE INDEX IF NOT EXISTS invitations_by_org ON invitations (org_id, id) WHERE ended_at IS NULL;

CREATE TABLE IF NOT EXISTS user_tokens (
  id UUID PRIMARY KEY,
  user_id UUID NOT NULL REFERENCES users (id),
  -- Of an access token; NULL for a personal token.
  session_id UUID REFERENCES sessions (id),
  hash BYTEA NOT NULL UNIQUE,
  description TEXT NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  revoked_at TIMESTAMPTZ,
  created_at TIMESTAMPTZ NOT NULL
);

CREATE INDEX IF NOT EXISTS user_tokens_user ON user_tokens (user_id);
CREATE INDEX IF NOT EXISTS user_tokens_session ON user_tokens (session_id) WHERE session_id IS NOT NULL;

CREATE TABLE IF NOT EXISTS service_accounts (
  id UUID PRIMARY KEY,
  org_id UUID NOT NULL REFERENCES orgs (id),
  project_id UUID NOT NULL REFERENCES projects (id),
  -- Of the account of an app instance, which has no role; NULL for the project's own.
  app_instance_id UUID,
  slug TEXT NOT NULL,
  name TEXT NOT NULL,
  description TEXT NOT NULL,
  -- Name of a role, or id of a custom one, which is in custom_role_id then.
  role TEXT NOT NULL,
  custom_role_id UUID REFERENCES custom_roles (id),
  status TEXT NOT NULL CHECK (status IN ('active', 'disabled')),
  resource_version INT8 NOT NULL DEFAULT 1,
  created_at TIMESTAMPTZ NOT NULL,
  updated_at TIMESTAMPTZ NOT NULL,
  deleted_at TIMESTAMPTZ
);

CREATE UNIQUE INDEX IF NOT EXISTS service_accounts_slug ON service_accounts (project_id, slug)
  WHERE deleted_at IS NULL AND app_instance_id IS NULL;
CREATE INDEX IF NOT EXISTS service_accounts_by_org ON service_accounts (org_id)
  WHERE deleted_at IS NULL AND app_instance_id IS NULL;
CREATE INDEX IF NOT EXISTS service_accounts_by_custom_role ON service_accounts (custom_role_id)
  WHERE custom_role_id IS NOT NULL;
CREATE UNIQUE INDEX IF NOT EXISTS service_accounts_by_instance ON service_accounts (app_instance_id)
  WHERE deleted_at IS NULL AND app_instance_id IS NOT NULL;

CREATE TABLE IF NOT EXISTS service_account_keys (
  id UUID PRIMARY KEY,
  service_account_id UUID NOT NULL REFERENCES service_accounts (id),
  public_key BYTEA NOT NULL,
  created_at TIMESTAMPTZ NOT NULL,
  -- Of a key that a newer one has replaced, and that stays valid until then.
  expires_at TIMESTAMPTZ,
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
