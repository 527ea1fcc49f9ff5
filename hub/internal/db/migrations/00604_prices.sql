-- +goose NO TRANSACTION
-- +goose Up
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
