#!/bin/sh
# standin.sh VERB NAME DIR [ARGUMENT...]: one step on one member of the cluster. Each may be repeated.
#
# STAND-IN: no step starts Kubernetes. Each keeps files in DIR as the real step changes the cluster, and names the real
# commands in its comment; put those in its place. The tasks, their order and what is repeated stay as they are.
set -eu
verb=$1 name=$2 dir=$3
shift 3

case $verb in
  server)
    # real: curl -sfL https://get.rke2.io | INSTALL_RKE2_TYPE=server sh -
    #       write /etc/rancher/rke2/config.yaml (node-name: NAME), systemctl enable --now rke2-server
    mkdir -p "$dir/nodes"
    [ -s "$dir/token" ] || (umask 077; head -c 32 /dev/urandom | base64 -w0 >"$dir/token")
    echo Ready >"$dir/nodes/$name"
    touch "$dir/rke2-server" ;;
  token)
    # real: cat /var/lib/rancher/rke2/server/node-token
    cat "$dir/token" ;;
  agent) # SERVER TOKEN
    # real: curl -sfL https://get.rke2.io | INSTALL_RKE2_TYPE=agent sh -
    #       write config.yaml (node-name: NAME, server: https://SERVER:9345, token: TOKEN),
    #       systemctl enable --now rke2-agent
    mkdir -p "$dir"
    (umask 077; printf 'node-name: %s\nserver: https://%s:9345\ntoken: %s\n' "$name" "$1" "$2" >"$dir/config.yaml")
    touch "$dir/rke2-agent" ;;
  registered) # NODE, on the server
    # real: nothing; the agent registers itself
    [ -s "$dir/nodes/$1" ] || echo Ready >"$dir/nodes/$1" ;;
  alive)
    # real: systemctl is-active rke2-server rke2-agent
    [ -e "$dir/rke2-server" ] || [ -e "$dir/rke2-agent" ] ;;
  ready) # NODE, on the server; empty for an unknown one
    # real: kubectl get node NODE -o jsonpath='{.status.conditions[?(@.type=="Ready")].status}' and .spec.unschedulable
    cat "$dir/nodes/$1" 2>/dev/null || true ;;
  drain) # NODE, on the server
    # real: kubectl drain NODE --ignore-daemonsets --delete-emptydir-data
    [ ! -e "$dir/nodes/$1" ] || echo Ready,SchedulingDisabled >"$dir/nodes/$1" ;;
  uncordon) # NODE, on the server
    # real: kubectl uncordon NODE
    [ ! -e "$dir/nodes/$1" ] || echo Ready >"$dir/nodes/$1" ;;
  delete) # NODE, on the server
    # real: kubectl delete node NODE --ignore-not-found
    rm -f "$dir/nodes/$1" ;;
  uninstall)
    # real: /usr/local/bin/rke2-uninstall.sh
    rm -rf "$dir" ;;
  *) echo "unknown step $verb" >&2; exit 2 ;;
esac
