#!/usr/bin/env bash
# Two ranks over a real slow link on one machine: network namespaces joined by a veth pair, shaped by tbf. Needs root and iproute2.
#   benchmarks/slow_link.sh [RATE] [OUT.json] [ladderize bench options ...]
# Measures prefill of 128 tokens, 8 layers of hidden size 1024, float32 messages over gloo (DESIGN section 8).
#   benchmarks/slow_link.sh 200mbit benchmarks/results/slow_link_train.json --train
# Measures training steps of 2 x 128 tokens of the same model: four layouts, each by the sequential schedule and by domino.
#   benchmarks/slow_link.sh 200mbit benchmarks/results/slow_link_vllm.json --engine vllm
# Measures prefill and decoding of the same model in vLLM (make test-vllm makes its environment): each rank in its namespace, and
# vLLM's own all-reduces and ladderize's messages over gloo; anything else is an error.
#   benchmarks/slow_link.sh 200mbit OUT.json -- calibrate --tp-size 2 --backend gloo ...
# Runs this command of ladderize's with these options in both namespaces, and no others.
#   PER_HOST=2 benchmarks/slow_link.sh 200mbit OUT.json --sync-tp-size 2
# Starts so many ranks in each namespace: with a layout of two virtual ranks these are two groups, which the slow link joins.
set -euo pipefail
cd "$(dirname "$0")/.."
rate=${1:-200mbit}
per_host=${PER_HOST:-1}
out=${2:-benchmarks/results/slow_link.json}
shift $(($# < 2 ? $# : 2))
case " $* " in
  *" --engine vllm "*) vllm=1 python=${PYTHON:-.venv-vllm/bin/python} ;;
  *) vllm= python=${PYTHON:-.venv/bin/python} ;;
esac
a=ladderize-a-$$ b=ladderize-b-$$
pids=() own_core=
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
  # compute half as fast while they send, and nothing hides. GSO=65536 shows that. After a pause, as many bytes as the burst pass at
  # once: the 32 kB of 256kbit are 1.3 ms of 200 Mbit/s, more than most messages of a decode step. BURST=64kbit GSO=8000 is nearly a
  # wire (planning_machine.py).
  ip -n "$namespace" link set "$device" up gso_max_size "${GSO:-16384}"
  ip netns exec "$namespace" tc qdisc add dev "$device" root tbf rate "$rate" burst "${BURST:-256kbit}" latency 50ms
done
arguments=(bench --random-weights benchmarks/shapes/slow_link.json --tp-size $((2 * per_host)) --dtype float32 --repeat 9 --threads 1)
case " $* " in
  *" --engine vllm "*) arguments+=(--batch-size 1 --prompt-len 128 --output-len 17) ;;
  *" --train "*) arguments+=(--backend gloo --batch-size 2 --prompt-len 128 --schedules sequential,domino) ;;
  *) arguments+=(--backend gloo --prompt-len 128 --output-len 2 --replicate-vocab) ;;
esac
if [ "${1:-}" = -- ]; then
  shift
  arguments=() own_core=1
fi
arguments+=("$@")
variables=()
if [ -n "$vllm" ]; then
  variables=(LADDERIZE_VLLM_BACKEND=gloo) own_core=1
fi
rank() { # namespace, device, rank, address, rank in the namespace
  local own=("${variables[@]}")
  if [ -n "$vllm" ]; then own+=(VLLM_HOST_IP="$4"); fi
  # a core for each, as ranks have that ladderize starts itself
  ip netns exec "$1" ${own_core:+taskset -c "$3"} env RANK="$3" WORLD_SIZE=$((2 * per_host)) LOCAL_RANK="$5" LOCAL_WORLD_SIZE="$per_host" MASTER_ADDR=10.77.0.1 MASTER_PORT=29511 \
    GLOO_SOCKET_IFNAME="$2" OMP_NUM_THREADS=1 "${own[@]}" "$python" -m ladderize "${arguments[@]}" --out "$out"
}
for ((number = 1; number < 2 * per_host; number++)); do
  if ((number < per_host)); then rank "$a" va "$number" 10.77.0.1 "$number" & else rank "$b" vb "$number" 10.77.0.2 $((number - per_host)) & fi
  pids+=($!)
done
rank "$a" va 0 10.77.0.1 0
wait "${pids[@]}"
if [ -n "$vllm" ]; then
  "$python" - "$out" <<'CHECK'
import json, sys
found = json.load(open(sys.argv[1]))
if not found["backend"].startswith("gloo over v") or found["messages"] != "gloo":
    sys.exit(f"{sys.argv[1]}: not over the link: {found['backend']}, messages {found['messages']}")
CHECK
fi
