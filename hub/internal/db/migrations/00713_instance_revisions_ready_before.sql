-- +goose NO TRANSACTION
-- +goose Up
-- Instances from before this column had one revision, which was ready when they were first running.
UPDATE instance_revisions SET ready_at = (SELECT i.activated_at FROM app_instances i WHERE i.id = instance_revisions.instance_id) WHERE ready_at IS NULL;
