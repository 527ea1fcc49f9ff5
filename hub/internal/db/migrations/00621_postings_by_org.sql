-- +goose NO TRANSACTION
-- +goose Up
CREATE INDEX IF NOT EXISTS postings_by_org ON postings (org_id, id);
