#!/usr/bin/env bash
# Two ranks over a real slow link on one machine: network namespaces joined by a veth pair, shaped by tbf. Needs root and iproute2.
#   benchmarks/slow_link.sh [RATE] [OUT.json] [ladderize bench options ...]
# Measures prefill of 128 tokens, 8 layers of hidden size 1024, float32 messages over gloo (DESIGN section 8).
#   benchmarks/slow_link.sh 200mbit benchmarks/results/slow_link_train.json --train
# Measures training steps of 2 x 128 tokens of the same model: four layouts, each by the sequential schedule and by domino.
set -euo pipefail
cd "$(dirname "$0")/.."
rate=${1:-200mbit}
out=${2:-benchmarks/results/slow_link.json}
shift $(($# < 2 ? $# : 2))
python=${PYTHON:-.venv/bin/python}
a=ladderize-a-$$ b=ladderize-b-$$
pids=()
clean() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
}
trap clean EXIT
ip netns add "$a"
ip netns add "$b"
ip link add va netns "$a" type veth peer name vb netns "$b"
ip -n "$a" addr add 10.77.0.1/24 dev va
ip -n "$b" addr add 10.77.0.2/24 dev vb
for side in "$a va" "$b vb"; do
  read -r namespace device <<<"$side"
  ip -n "$namespace" link set lo up
  # Packets larger than tbf's burst are cut up in software, at a CPU cost that a network card does not have: ladder's ranks then
  # compute half as fast while they send, and nothing hides. GSO=65536 shows that.
  ip -n "$namespace" link set "$device" up gso_max_size "${GSO:-16384}"
  ip netns exec "$namespace" tc qdisc add dev "$device" root tbf rate "$rate" burst 256kbit latency 50ms
done
arguments=(bench --random-weights benchmarks/shapes/slow_link.json --tp-size 2 --backend gloo --dtype float32 --repeat 9 --threads 1)
case " $* " in
  *" --train "*) arguments+=(--batch-size 2 --seq-len 128) ;;
  *) arguments+=(--prompt-len 128 --output-len 2 --replicate-vocab) ;;
esac
arguments+=("$@")
rank() { # namespace, device, rank
  ip netns exec "$1" env RANK="$3" WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.77.0.1 MASTER_PORT=29511 \
    GLOO_SOCKET_IFNAME="$2" OMP_NUM_THREADS=1 "$python" -m ladderize "${arguments[@]}" --out "$out"
}
rank "$b" vb 1 &
pids+=($!)
rank "$a" va 0
wait "${pids[@]}"
