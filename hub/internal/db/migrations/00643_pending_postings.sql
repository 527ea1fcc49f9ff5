-- +goose NO TRANSACTION
-- +goose Up
-- What usage has drawn from holds and the journal does not have yet: one posting to come for each subject, meter and price.
CREATE TABLE IF NOT EXISTS pending_postings (
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
  PRIMARY KEY (subject_id, meter, price_id)
);
