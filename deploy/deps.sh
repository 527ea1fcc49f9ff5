#!/usr/bin/env bash
# Installs what is missing on a Debian 12 machine, and only that: a binary that is there, from whatever vendor, stays.
#   deps.sh run        what the demo and the tests need (the tests read the firewall with nft; the agent does not)
#   deps.sh generate   what `make generate` needs
set -euo pipefail

declare -A run=(
  [containerd]=containerd [runc]=runc [iptables]=iptables [nft]=nftables [ip]=iproute2 [nsenter]=util-linux
  [mmdebstrap]=mmdebstrap [chromium]=chromium [jq]=jq [ps]=procps [mount]=mount [curl]=curl [gcc]=gcc
  [uuidgen]=uuid-runtime [python3]=python3 [mypy]=mypy [sshd]=openssh-server
  [mkfs.ext4]=e2fsprogs [systemctl]=systemd [systemd-nspawn]=systemd-container
  [slurmctld]=slurmctld [slurmd]=slurmd [srun]=slurm-client [munged]=munge
)
declare -A generate=([protoc]=protobuf-compiler)

missing=()
PATH=$PATH:/usr/sbin:/sbin
case "${1:-run}" in
  run)
    for b in "${!run[@]}"; do command -v "$b" >/dev/null || missing+=("${run[$b]}"); done
    compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || command -v postgres >/dev/null ||
      missing+=(postgresql)
    python3 -c 'import cryptography' 2>/dev/null || missing+=(python3-cryptography)
    [ -x /usr/lib/cni/bridge ] || [ -x /opt/cni/bin/bridge ] || missing+=(containernetworking-plugins)
    ;;
  generate)
    for b in "${!generate[@]}"; do command -v "$b" >/dev/null || missing+=("${generate[$b]}"); done
    [ -e /usr/include/google/protobuf/timestamp.proto ] || missing+=(libprotobuf-dev)
    ;;
  *) echo "usage: deps.sh run|generate" >&2; exit 2 ;;
esac
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ]; then
  echo "missing: ${missing[*]}; run this as root, or install them yourself" >&2
  exit 1
fi
echo "installing: ${missing[*]}"
# Debian's postgresql would start a cluster of its own on 5432.
if printf '%s\n' "${missing[@]}" | grep -qx postgresql && [ ! -e /etc/postgresql-common/createcluster.conf ]; then
  mkdir -p /etc/postgresql-common
  echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
fi
# Debian's openssh-server would serve logins on port 22.
if printf '%s\n' "${missing[@]}" | grep -qx openssh-server; then
  mkdir -p /etc/ssh
  touch /etc/ssh/sshd_not_to_be_run
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq -o Acquire::Retries=5
apt-get install -y -qq -o Acquire::Retries=5 --no-install-recommends "${missing[@]}" >/dev/null
