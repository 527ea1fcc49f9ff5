-- +goose NO TRANSACTION
-- +goose Up
INSERT INTO skus (slug, capacity_shape, accelerator_model, accelerator_count, cpu_cores, memory_mib) VALUES
  ('cpu-1', 'gpu_slice', '', 0, 1, 1024),
  ('cpu-2', 'gpu_slice', '', 0, 2, 4096),
  ('cpu-4', 'gpu_slice', '', 0, 4, 8192)
ON CONFLICT (slug) DO NOTHING;
