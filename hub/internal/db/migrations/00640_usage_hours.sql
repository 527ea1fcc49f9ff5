-- +goose NO TRANSACTION
-- +goose Up
-- What was accepted of each subject, meter, price and UTC hour, and what was charged for it. Kept for good. price_id is the
-- nil UUID where the usage has no price.
CREATE TABLE IF NOT EXISTS usage_hours (
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
  PRIMARY KEY (subject_id, hour, meter, price_id)
);
