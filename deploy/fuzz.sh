#!/usr/bin/env bash
# Runs every fuzz target of the project for the given time.
set -euo pipefail
time=${1:-20s}
grep -rlE '^func Fuzz' --include='*_test.go' . | while read -r file; do
  grep -oE '^func Fuzz[A-Za-z0-9_]+' "$file" | awk '{print $2}' | while read -r name; do
    echo "fuzz $(dirname "$file") $name"
    go test -run '^$' -fuzz "^${name}\$" -fuzztime "$time" "./$(dirname "$file")"
  done
done
