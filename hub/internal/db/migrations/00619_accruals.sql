-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS accruals (
  subject_id UUID NOT NULL,
  meter TEXT NOT NULL,
  price_id UUID NOT NULL,
  hour TIMESTAMPTZ NOT NULL,
  quantity INT8 NOT NULL,
  -- round(price x quantity) = collected + written off.
  charged_nanos INT8 NOT NULL,
  collected_nanos INT8 NOT NULL,
  written_off_nanos INT8 NOT NULL,
  host_nanos INT8 NOT NULL,
  PRIMARY KEY (subject_id, meter, price_id, hour)
);
