-- +goose NO TRANSACTION
-- +goose Up
-- Usage without a price had no accrual.
INSERT INTO usage_hours (subject_id, hour, meter, price_id, quantity, records, charged_nanos, collected_nanos, written_off_nanos, host_nanos)
SELECT u.subject_id, date_trunc('hour', u.started_at), u.meter, '00000000-0000-0000-0000-000000000000'::UUID, sum(u.quantity)::INT8, count(*), 0, 0, 0, 0
FROM usage_records u WHERE NOT EXISTS (SELECT 1 FROM accruals a WHERE a.subject_id = u.subject_id AND a.meter = u.meter)
GROUP BY u.subject_id, date_trunc('hour', u.started_at), u.meter
ON CONFLICT (subject_id, hour, meter, price_id) DO NOTHING;
