#!/usr/bin/env bash
# What needs a GPU, in parts of at most 8 minutes each, those that tell most first: gpu.sh [--dry-run] PART
#   kernels  what a decode step of one rank's part of a 70B at TP8 is made of, and what other kernels could save
#   tests    the runtime against the oracle and the CPU
#   shard    one rank's part of a 70B at emulated TP8
#   runtime  the whole of an 8B: the runtime at TP1, and transformers' forward pass
#   profile  the proof that ladder's delays are under compute, from a trace
#   ranks    a 70B over all GPUs of this machine, by NCCL's sums alone and with symmetric memory
#   vllm     in vLLM: norms stored in float32, then layouts, one rank's part
#   train    SPD's recovery, retraining and Domino: correctness, then times and memory
#   real     a real model retrained on 20M and 100M tokens (real_gpu.yaml); stopped, it goes on when run again. `make
#            real` and then `gpu.sh pack` write its files as real/travel/part-*, for a machine that takes 64 MiB a time
# --dry-run prints the commands of a part, each after its seconds. Ends with 0: done, 1: something failed, 2: no such
# part, 3: this machine lacks what the part needs. Needs torch, transformers, accelerate, peft, typer, rich and PyYAML;
# tests also pytest and pytest-xdist; no network, no lm-eval. JSON goes to ${OUT:-benchmarks/results} as it is measured.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" = pack ]; then
  [ -d real/smollm2 ] || { echo "pack: real/smollm2 is missing; run make real first"; exit 1; }
  rm -rf real/texts real/travel && mkdir -p real/travel
  cp -r --no-preserve=mode "${TEXTS:-../shared/real}" real/texts
  cp ../shared/fixtures/wikitext-2/test.txt real/wikitext.txt
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 -d real/wheels \
    "datasets==5.2.0" "dill<0.4.2" "multiprocess<0.70.20"
  tar -c real/smollm2 real/texts real/wikitext.txt real/wheels | xz -T0 | split -b 50M - real/travel/part-
  exit
fi
dry=
if [ "${1:-}" = --dry-run ]; then
  dry=yes
  shift
fi
out=${OUT:-benchmarks/results}
export PYTHONPATH=. HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

lacks() { # lacks WHAT: this machine cannot run the part
  echo "$1"
  exit 3
}

failed=0
gpu=
limited() { # limited SECONDS COMMAND...: says what became of it, and goes on
  local code=0
  if [ -n "$dry" ]; then
    printf '%q ' "$@"
    echo
    return
  fi
  if [ -z "$gpu" ]; then
    gpu=$(python3 -c 'import torch, transformers as t; print(torch.cuda.get_device_name(), torch.__version__, t.__version__)') ||
      lacks "there is no GPU, or no PyTorch for it"
    echo "$gpu"
    mkdir -p "$out"
  fi
  timeout "$@" || code=$?
  case $code in
    0) ;;
    124) echo "STOPPED after $1 s: ${*:2}"; failed=1 ;;
    *) echo "FAILED ($code): ${*:2}"; failed=1 ;;
  esac
}

case "${1:-}" in
  kernels)
    limited 60 python3 benchmarks/gpu_kernels.py rates --out "$out/kernels_rates_cuda.json"
    limited 120 python3 benchmarks/gpu_kernels.py table --out "$out/kernels_table_cuda.json"
    limited 120 python3 benchmarks/gpu_kernels.py forks --out "$out/kernels_forks_cuda.json"
    limited 120 python3 benchmarks/gpu_kernels.py gemv --out "$out/kernels_gemv_cuda.json"
    limited 60 python3 benchmarks/gpu_kernels.py pdl --out "$out/kernels_pdl_cuda.json" ;;
  tests) limited 440 python3 -m pytest -q -n 6 tests/test_gpu.py ;;
  shard) limited 470 python3 benchmarks/gpu_runtime.py shard --out "$out/runtime_shard_cuda.json" ;;
  runtime)
    limited 370 python3 benchmarks/gpu_runtime.py whole --out "$out/runtime_whole_cuda.json"
    limited 100 python3 benchmarks/model.py --device cuda --dtype bfloat16 --shape 8b --out "$out/model_cuda.json" ;;
  profile)
    traces=$(mktemp -d) # large, and of no use once the overlap is in the JSON
    limited 240 python3 -m ladderize bench --random-weights 70b --layout dense,ladder --emulate-tp 8 --link 20,1e6 \
      --replicate-vocab --dtype bfloat16 --device cuda --prompt-len 1024 --output-len 33 --warmup 1 --repeat 3 \
      --profile "$traces" --out "$out/profile_cuda.json"
    rm -r "$traces" ;;
  ranks)
    # Expected of 8 H100s over NVLink, ladder over dense, end to end: 1.33 to 1.39 with NCCL's sums only, which is how
    # 1.34 was published, and 1.18 to 1.22 with symmetric memory, whose sums leave less to hide. One counted round,
    # since each has 511 steps.
    gpus=8
    if [ -z "$dry" ]; then
      gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
    fi
    if [ "$gpus" -lt 2 ]; then lacks "ranks: fewer than two GPUs here, nothing to sum"; fi
    for backend in nccl auto; do
      limited 240 python3 -m ladderize bench --random-weights 70b --layout dense,ladder --tp-size "$gpus" \
        --backend "$backend" --replicate-vocab --dtype bfloat16 --device cuda --batch-size 1,4,16 --prompt-len 1024 \
        --output-len 512 --warmup 1 --repeat 1 --out "$out/ranks_${backend}_cuda.json"
    done ;;
  vllm)
    if [ -z "$dry" ] && ! python3 -c 'import vllm' 2> /dev/null; then
      lacks "vllm: vLLM is not installed here"
    fi
    limited 100 python3 benchmarks/gpu_vllm_norms.py --out "$out/vllm_norms_cuda.json"
    limited 370 python3 benchmarks/gpu_vllm.py --num-layers 16 --out "$out/vllm_cuda.json" ;;
  train)
    limited 120 python3 benchmarks/gpu_spd.py --out "$out/spd_cuda.json"
    limited 150 python3 benchmarks/gpu_adapt.py --out "$out/adapt_cuda.json"
    limited 200 python3 benchmarks/gpu_domino.py --out "$out/domino_cuda.json" ;;
  real)
    if [ -z "$dry" ]; then
      if [ ! -d real/smollm2 ]; then cat real/travel/part-* | tar -xJ; fi
      python3 -m pip install -q --no-index --no-deps --upgrade --target real/site real/wheels/*.whl
      cat real/texts/train/chat_*.jsonl > real/instructions.jsonl
    fi
    export PYTHONPATH=.:real/site
    [ -z "$dry" ] && test -e real/answers.jsonl ||
      limited 100 python3 -m ladderize generate real/smollm2 --prompt-file real/instructions.jsonl \
        --max-new-tokens 256 --concurrency 512 --out real/answers.jsonl
    [ -z "$dry" ] && test -e real/long.jsonl || limited 60 python3 scripts/real_model.py real real/texts --long
    limited 310 python3 -m ladderize sweep benchmarks/real_gpu.yaml
    if [ -z "$dry" ]; then cp real/gpu/sweep.json "$out/real_cuda.json"; fi ;;
  *) sed -n "2,$(($(grep -nm1 '^set ' "$0" | cut -d: -f1) - 1))p" "$0"; exit 2 ;;
esac
exit $failed
