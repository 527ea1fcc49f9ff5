-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS instance_reports (
  node_id UUID PRIMARY KEY,
  session_no INT8 NOT NULL,
  counter INT8 NOT NULL,
  reported_at TIMESTAMPTZ NOT NULL
);
