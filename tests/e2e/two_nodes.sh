#!/bin/bash
# Two Ray nodes on one Linux machine (root): a network and a pid namespace each, joined by a cable.
#
#   two_nodes.sh up               start both; node A is the head, resources {a: 8} and {b: 8}
#   two_nodes.sh run COMMAND…     run a command on node A, with RAY_ADDRESS of the cluster
#   two_nodes.sh submit ARG…      ray job submit --working-dir . -- python -m cluster serve ARG…
#   two_nodes.sh get URL          print what a URL answers on node A; fails if it does not
#   two_nodes.sh crash            node B dies, with all its processes, as if its power was cut
#   two_nodes.sh again            node B is started again
#   two_nodes.sh head             the same of node A: everything ends, unless REDIS_PORT is set
#   two_nodes.sh cut | mend       unplug and plug the cable
#   two_nodes.sh down             end everything; nothing is left
#
# For example, prefill on A and decode on B:
#   two_nodes.sh up
#   two_nodes.sh submit --set 'prefill.resources={a: 1}' --set 'decode.resources={b: 1}' &
#   two_nodes.sh get http://127.0.0.1:8000/v1/models
#   two_nodes.sh down
#
# Environment: PYTHON_BIN (directory of ray and python; default: that of python on PATH) and
# TWO_NODES_DIR (default /tmp/kvl2; short, because Ray puts sockets there); ON (a or b: where `run`
# runs); REDIS_PORT: node A keeps Ray's state in a Redis there.
set -euo pipefail

dir=${TWO_NODES_DIR:-/tmp/kvl2}
bin=${PYTHON_BIN:-$(dirname "$(command -v python)")}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
head=10.78.0.1 on=${ON:-a}
[ -z "${REDIS_PORT:-}" ] || export RAY_REDIS_ADDRESS=$head:$REDIS_PORT
export PATH=$bin:$PATH
export RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0
export RAY_health_check_initial_delay_ms=1000 RAY_health_check_period_ms=500
export RAY_health_check_timeout_ms=1000 RAY_health_check_failure_threshold=3

# With ports of their agents given, nodes do not wait for them: after 15 s they would fail.
node() { # NAME ADDRESS ARG…: a Ray node in its own namespaces; its first process is all of it
    local name=$1 address=$2; shift 2
    mkdir -p "$dir/$name"
    ip netns exec "kvl$name" unshare -p -f --mount-proc --kill-child \
        ray start --block --node-ip-address="$address" --num-cpus=4 --resources="{\"$name\": 8}" \
        --object-store-memory=100000000 --disable-usage-stats \
        --dashboard-agent-grpc-port=52366 --dashboard-agent-listen-port=52365 \
        --runtime-env-agent-port=52367 "$@" \
        >"$dir/$name.log" 2>&1 </dev/null &
    echo $! >"$dir/$name.pid"
}

failed() {
    echo "the nodes did not come up:" >&2; tail -n 5 "$dir"/*.log >&2
    exit 1
}

wait_head() { # until it listens
    for _ in $(seq 900); do
        ! ip netns exec kvla bash -c "echo >/dev/tcp/$head/6379" 2>/dev/null || return 0
        sleep 0.2
    done
    failed
}

first() {
    node a $head --head --no-monitor --port=6379 --dashboard-host=0.0.0.0 --dashboard-port=8265 \
        --temp-dir="$dir/a"
    wait_head
}

second() { node b 10.78.0.2 --address=$head:6379 --temp-dir="$dir/b"; }

wait_nodes() { # COUNT
    run python - "$1" <<'EOF' 2>/dev/null || failed
import sys, time, ray
ray.init(address="10.78.0.1:6379", log_to_driver=False, logging_level="ERROR")
deadline = time.monotonic() + 150
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    assert time.monotonic() < deadline
    time.sleep(0.2)
EOF
}

run() {
    (cd "$here" && ip netns exec "kvl$on" env RAY_ADDRESS=$head:6379 TMPDIR="$dir/tmp" \
        XDG_RUNTIME_DIR="$dir/run" "$@")
}

up() {
    [ ! -e "$dir" ] || { echo "$dir exists; run: $0 down" >&2; exit 1; }
    down  # names in /run/netns outlive a namespace that was killed with this in it
    mkdir -p "$dir/tmp" "$dir/run"
    ip netns add kvla; ip netns add kvlb
    ip link add va netns kvla type veth peer name vb netns kvlb
    ip -n kvla addr add $head/24 dev va; ip -n kvlb addr add 10.78.0.2/24 dev vb
    for n in a b; do ip -n kvl$n link set lo up; ip -n kvl$n link set v$n up; done
    [ -z "${REDIS_PORT:-}" ] || ip netns exec kvla redis-server --bind $head --port "$REDIS_PORT" \
        --protected-mode no --save "" --daemonize yes --pidfile "$dir/redis.pid" >"$dir/redis.log"
    first
    second
    wait_nodes 2
    if python -c 'import aiohttp_cors' 2>/dev/null; then
        for i in $(seq 60); do
            ! get "http://$head:8265/api/version" >/dev/null 2>&1 || break
            [ "$i" -lt 60 ] || echo "the job API does not answer: $dir/a/session_latest/logs"
            sleep 0.5
        done
    else
        echo "no job API, submit will not work: pip install 'ray[default]'"
    fi
    echo "two nodes are up, $head:6379; jobs: http://$head:8265"
}

get() {
    run python -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())' "$1"
}

submit() {
    (cd "$here" && ip netns exec kvla env RAY_ADDRESS=http://$head:8265 TMPDIR="$dir/tmp" \
        ray job submit --working-dir . -- python -m cluster serve "$@")
}

crash() { # NAME: only if that pid still is the unshare that `node` began
    local pid; pid=$(cat "$dir/$1.pid")
    if tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -q "^unshare .*ray start --block"; then
        kill -9 "$pid"
    fi
}

down() {
    for n in a b; do
        [ ! -e "$dir/$n.pid" ] || crash $n
        ip netns del kvl$n 2>/dev/null || true
    done
    [ ! -e "$dir/redis.pid" ] || kill "$(cat "$dir/redis.pid")"
    rm -rf "$dir"
}

case ${1:-} in
    up) up ;;
    run) shift; run "$@" ;;
    get) shift; get "$1" ;;
    submit) shift; submit "$@" ;;
    crash) crash b ;;
    head) crash a; sleep 2; rm -rf "$dir/a"; first; wait_nodes 2 ;;
    again) crash b; rm -rf "$dir/b"; second; wait_nodes 2 ;;
    cut) ip -n kvlb link set vb down ;;
    mend) ip -n kvlb link set vb up ;;
    down) down ;;
    *) sed -n '2,23s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
