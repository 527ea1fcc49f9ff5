-- +goose NO TRANSACTION
-- +goose Up
CREATE TABLE IF NOT EXISTS skus (
  slug TEXT PRIMARY KEY,
  capacity_shape TEXT NOT NULL,
  accelerator_model TEXT NOT NULL,
  accelerator_count INT8 NOT NULL,
  cpu_cores INT8 NOT NULL,
  memory_mib INT8 NOT NULL
);
