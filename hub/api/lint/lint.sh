#!/usr/bin/env bash
# lint.sh BIN: lints the two contracts with the programs in BIN, without a network. A warning fails.
set -euo pipefail
cd "$(dirname "$0")/.."
export REDOCLY_TELEMETRY=off REDOCLY_SUPPRESS_UPDATE_NOTICE=true

quiet() { out=$("$@" 2>&1) || { echo "$out"; exit 1; }; }
# Redocly ends with 0 after warnings.
out=$("$1/redocly" lint --extends=recommended --format=github-actions openapi.yaml 2>&1) || { echo "$out"; exit 1; }
if grep '^::' <<<"$out"; then exit 1; fi
quiet "$1/spectral" lint --fail-severity=warn --ruleset lint/spectral.yaml openapi.yaml
quiet node lint/asyncapi.cjs asyncapi.yaml
