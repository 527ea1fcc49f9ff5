-- +goose NO TRANSACTION
-- +goose Up
INSERT INTO usage_hours (subject_id, hour, meter, price_id, quantity, records, charged_nanos, collected_nanos, written_off_nanos, host_nanos)
SELECT subject_id, hour, meter, price_id, quantity, 0, charged_nanos, collected_nanos, written_off_nanos, host_nanos FROM accruals
ON CONFLICT (subject_id, hour, meter, price_id) DO NOTHING;
