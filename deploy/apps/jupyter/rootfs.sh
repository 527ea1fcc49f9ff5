#!/usr/bin/env bash
# Writes the root file system of the Jupyter image as a tar: Debian 12's own packages and nothing else.
#   rootfs.sh OUT.tar
set -euo pipefail
out=${1:?usage: rootfs.sh OUT.tar}
suite=bookworm

# The machine's own package sources, where they serve the suite; mmdebstrap's default otherwise.
sources=()
for f in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
  if [ -f "$f" ] && grep -qE "(^|[[:space:]])${suite}([[:space:]]|\$)" "$f"; then sources+=("$f"); fi
done

# Fixed times make two runs over the same packages alike.
export SOURCE_DATE_EPOCH=0
exec mmdebstrap --quiet --variant=minbase --include=jupyter-notebook,python3-pip,ca-certificates \
  --aptopt='Acquire::Languages "none"' --aptopt='Acquire::Retries "5"' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/info/*' \
  --customize-hook='echo "jupyter:x:1000:1000:Jupyter:/home/jupyter:/bin/bash" >>"$1/etc/passwd"' \
  --customize-hook='echo "jupyter:x:1000:" >>"$1/etc/group"' \
  --customize-hook='mkdir -p "$1/home/jupyter" && chown 1000:1000 "$1/home/jupyter"' \
  --customize-hook='rm -rf "$1"/var/cache/* "$1"/var/log/* "$1"/var/lib/apt/lists/* "$1"/etc/hostname "$1"/etc/resolv.conf "$1"/etc/machine-id' \
  "$suite" "$out" "${sources[@]}"
