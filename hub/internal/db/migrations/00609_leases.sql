-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS leases (
  subject_id UUID NOT NULL,
  lease_no INT8 NOT NULL,
  node_id UUID NOT NULL,
  hold_id UUID NOT NULL,
  currency TEXT NOT NULL,
  cap_nanos INT8 NOT NULL,
  issued_at TIMESTAMPTZ NOT NULL,
  expires_at TIMESTAMPTZ NOT NULL,
  duration_seconds INT8 NOT NULL,
  end_policy TEXT NOT NULL,
  -- Frozen: [{meter, price_id, nanos, per_quantity, host_basis_points}].
  prices JSONB NOT NULL,
  PRIMARY KEY (subject_id, lease_no)
);
