-- +goose NO TRANSACTION
-- +goose Up
-- The raw usage of all slots, and what a release without slots has left, for operators and tests.
CREATE OR REPLACE VIEW usage_recent AS
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id FROM usage_records_0 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id FROM usage_records_1 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id FROM usage_records_2 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id FROM usage_records_3 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id FROM usage_records_4 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id FROM usage_records_5 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id FROM usage_records_6 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id FROM usage_records_7 UNION ALL
  SELECT id, subject_id, meter, quantity, started_at, ended_at, run_id, lease_no, posting_id FROM usage_records;
