-- +goose NO TRANSACTION
-- +goose Up
-- Its rows are in usage_hours. A hub of an older release that is started again must not go on with books that have stood still: without
-- the table it posts no usage, and nodes keep theirs until a newer hub is back.
DROP TABLE IF EXISTS accruals;
