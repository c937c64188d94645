#!/bin/bash
# A Docker engine of its own, for the tests: engine.sh start | stop
#
# It lives in a network namespace: the host's interfaces, iptables and forwarding stay as they are, and the
# containers have no way out. Root, Debian. What is slow to make is kept under ${TMPDIR:-/tmp}/edgefl-engine:
# a base image by debootstrap (tagged python:3.11-slim, since there is no hub), wheels, the engine's data.
set -euo pipefail

CACHE=${EDGEFL_ENGINE_CACHE:-${TMPDIR:-/tmp}/edgefl-engine}
PYTHON=${PYTHON:-python3}
NAMESPACE=edgefl-engine
BASE=python:3.11-slim
REPOSITORY=$(cd "$(dirname "$0")/../.." && pwd)
export DOCKER_HOST=unix://$CACHE/docker.sock
docker() { /usr/bin/docker "$@"; }
say() { echo "[${SECONDS}s] $*"; }

packages() {
  local missing=()
  command -v dockerd >/dev/null || missing+=(docker.io)
  command -v docker-compose >/dev/null || missing+=(docker-compose)
  command -v debootstrap >/dev/null || missing+=(debootstrap)
  command -v ip >/dev/null || missing+=(iproute2)
  [ ${#missing[@]} -eq 0 ] && return
  apt-get update -q >/dev/null
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
}

engine() {
  ip netns add $NAMESPACE
  ip -n $NAMESPACE link set lo up
  # nsenter, not 'ip netns exec': the latter mounts a fresh /sys, without the control groups.
  setsid nsenter --net=/run/netns/$NAMESPACE dockerd --data-root "$CACHE/data" --exec-root "$CACHE/exec" \
    -p "$CACHE/dockerd.pid" -H "$DOCKER_HOST" --group root \
    --bip 172.30.0.1/24 --default-address-pool base=172.30.16.0/20,size=24 \
    >"$CACHE/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 120); do
    docker info >/dev/null 2>&1 && return
    sleep 0.5
  done
  echo "the engine does not start:" >&2
  tail -5 "$CACHE/dockerd.log" >&2
  return 1
}

base() {
  docker image inspect $BASE >/dev/null 2>&1 && return
  if [ ! -e "$CACHE/base.tar" ]; then
    local mirror
    mirror=$(apt-get indextargets --format '$(SITE)' 'CREATED_BY: Packages' 'CODENAME: bookworm' | sort -u | head -1)
    rm -rf "$CACHE/rootfs"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm \
      "$CACHE/rootfs" "$mirror" >"$CACHE/debootstrap.log" 2>&1
    rm -rf "$CACHE"/rootfs/var/cache/apt/archives/*.deb "$CACHE"/rootfs/var/lib/apt/lists/*
    tar -C "$CACHE/rootfs" -c . -f "$CACHE/base.tar.part"
    mv "$CACHE/base.tar.part" "$CACHE/base.tar"
    rm -rf "$CACHE/rootfs"
  fi
  docker import "$CACHE/base.tar" $BASE >/dev/null
}

wheels() {
  # The base has Python 3.11; wheels for it can be fetched by any Python.
  local stamp=$CACHE/wheels/.complete
  [ -e "$stamp" ] && [ "$stamp" -nt "$REPOSITORY/pyproject.toml" ] && return
  "$PYTHON" -m pip download -q --disable-pip-version-check -d "$CACHE/wheels" \
    --python-version 3.11 --only-binary :all: "$REPOSITORY[data]" setuptools wheel 2>"$CACHE/pip.log" ||
    { tail -3 "$CACHE/pip.log" >&2; return 1; }
  touch "$stamp"
}

stop() {
  if [ -e "$CACHE/dockerd.pid" ]; then
    kill "$(cat "$CACHE/dockerd.pid")" 2>/dev/null || rm -f "$CACHE/dockerd.pid"
    for _ in $(seq 60); do
      [ -e "$CACHE/dockerd.pid" ] || break
      sleep 0.5
    done
  fi
  ip netns del $NAMESPACE 2>/dev/null || true
}

case ${1:-} in
  start)
    mkdir -p "$CACHE/wheels"
    packages
    say "packages"
    stop
    trap stop EXIT
    engine
    say "engine"
    base
    say "base image"
    wheels
    say "wheels"
    trap - EXIT
    ;;
  stop) stop ;;
  *)
    echo "engine.sh start | stop" >&2
    exit 2
    ;;
esac
