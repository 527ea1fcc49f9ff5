#!/bin/sh
# member.sh VERB NAME DIR [ARGUMENT...]: one step on one member of the cluster, as root. Each may be repeated.
set -eu
verb=$1 name=$2 dir=$3
shift 3
export SLURM_CONF="$dir/slurm.conf"

# stop PROGRAM ends the daemon of a pid file and waits for its end. After a reboot another process may have the number.
stop() {
  pid=$(cat "$dir/$1.pid" 2>/dev/null) && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$1" ] || return 0
  kill "$pid"
  timeout 20 tail --pid="$pid" -f /dev/null || kill -9 "$pid" || true
  rm -f "$dir/$1.pid"
}

state() { sinfo -h -n "$1" -o %T; }

case $verb in
  install) command -v munged slurmctld slurmd scontrol >/dev/null ;;
  hostname) hostname -s ;;
  key) # the cluster's munge key in base64; made on the first call
    mkdir -p "$dir"
    [ -s "$dir/munge.key" ] || (umask 077; head -c 128 /dev/urandom >"$dir/munge.key")
    base64 -w0 "$dir/munge.key" ;;
  configure) # CONFIGURATION KEY, both in base64
    mkdir -p "$dir/ctld" "$dir/$name"
    (umask 077; echo "$2" | base64 -d >"$dir/munge.key")
    printf 'CgroupAutomount=no\nIgnoreSystemd=yes\n' >"$dir/cgroup.conf"
    echo "$1" | base64 -d >"$dir/slurm.conf.new"
    mv "$dir/slurm.conf.new" "$dir/slurm.conf" ;;
  start) # ROLE
    munge -S "$dir/munge.socket" -n >/dev/null 2>&1 ||
      munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
        --log-file="$dir/munged.log" --seed-file="$dir/munge.seed"
    if [ "$1" = controller ]; then
      stop slurmctld
      slurmctld -f "$SLURM_CONF"
    fi
    stop slurmd
    slurmd -N "$name" -f "$SLURM_CONF" ;;
  alive) # prints yes where the daemon that runs jobs does; Slurm itself notices its end minutes later
    pid=$(cat "$dir/slurmd.pid" 2>/dev/null) && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = slurmd ] && echo yes || echo no ;;
  state) # NODE: as sinfo has it; empty for an unknown one
    state "$1" ;;
  drain) # NODE
    scontrol update "nodename=$1" state=drain reason=removed ;;
  resume) # NODE: only one that Slurm has given up is resumed
    case $(state "$1") in down*|drain*) scontrol update "nodename=$1" state=resume ;; esac ;;
  remove)
    for daemon in slurmd slurmctld munged; do stop $daemon; done
    rm -rf "$dir" ;;
  *) echo "unknown step $verb" >&2; exit 2 ;;
esac
