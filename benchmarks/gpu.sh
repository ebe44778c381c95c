#!/usr/bin/env bash
# What needs a GPU, in parts of at most 8 minutes each: gpu.sh tests | train | runtime | shard | vllm | ranks | real
#   tests    the model, the runtime and training against the oracle and the CPU
#   train    SPD's recovery, retraining and Domino: correctness, then times and memory
#   runtime  an 8B model: transformers' forward pass, and the runtime at TP1
#   shard    one rank's part of a 70B at emulated TP8
#   vllm     in vLLM: norms stored in float32, then layouts, one rank's part
#   ranks    `bench --tp-size N` over all GPUs of this machine
#   real     a real model retrained on 20M and 100M tokens (real_gpu.yaml); stopped, it goes on when run again. `make
#            real` and then `gpu.sh pack` write its files as real/travel/part-*, for a machine that takes 64 MiB a time
# Needs torch, transformers, accelerate, peft, typer, rich and PyYAML; no network, no lm-eval. JSON goes to
# ${OUT:-benchmarks/results} as it is measured.
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
out=${OUT:-benchmarks/results}
mkdir -p "$out"
export PYTHONPATH=. HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 -c 'import torch, transformers; assert torch.cuda.is_available(), "no GPU here"; print(torch.cuda.get_device_name(), torch.__version__, transformers.__version__)'

failed=0
limited() { # limited SECONDS COMMAND...: says what became of it, and goes on
  local code=0
  timeout "$@" || code=$?
  case $code in
    0) ;;
    124) echo "STOPPED after $1 s: ${*:2}"; failed=1 ;;
    *) echo "FAILED ($code): ${*:2}"; failed=1 ;;
  esac
}

case "${1:-}" in
  tests)
    limited 380 python3 -m pytest -q -n 6 -k "not takes_its_time" tests/test_gpu.py
    limited 60 python3 -m pytest -q -k takes_its_time tests/test_gpu.py ;;  # with the GPU to itself
  train)
    limited 120 python3 benchmarks/gpu_spd.py --out "$out/spd_cuda.json"
    limited 150 python3 benchmarks/gpu_adapt.py --out "$out/adapt_cuda.json"
    limited 200 python3 benchmarks/gpu_domino.py --out "$out/domino_cuda.json" ;;
  runtime)
    limited 100 python3 benchmarks/model.py --device cuda --dtype bfloat16 --shape 8b --out "$out/model_cuda.json"
    limited 370 python3 benchmarks/gpu_runtime.py whole --out "$out/runtime_whole_cuda.json" ;;
  shard) limited 470 python3 benchmarks/gpu_runtime.py shard --out "$out/runtime_shard_cuda.json" ;;
  vllm)
    if python3 -c 'import vllm' 2> /dev/null; then
      limited 100 python3 benchmarks/gpu_vllm_norms.py --out "$out/vllm_norms_cuda.json"
      limited 370 python3 benchmarks/gpu_vllm.py --num-layers 16 --out "$out/vllm_cuda.json"
    else
      echo "vllm: vLLM is not installed here"
    fi ;;
  ranks)
    gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
    if [ "$gpus" -lt 2 ]; then
      echo "ranks: one GPU here, nothing to sum"
    else
      limited 470 python3 -m ladderize bench --random-weights 8b --layout dense,ladder,spd+ladder --tp-size "$gpus" \
        --dtype bfloat16 --json --out "$out/ranks_cuda.json"
    fi ;;
  real)
    if [ ! -d real/smollm2 ]; then cat real/travel/part-* | tar -xJ; fi
    python3 -m pip install -q --no-index --no-deps --upgrade --target real/site real/wheels/*.whl
    export PYTHONPATH=.:real/site
    cat real/texts/train/chat_*.jsonl > real/instructions.jsonl
    test -e real/answers.jsonl || limited 100 python3 -m ladderize generate real/smollm2 --prompt-file real/instructions.jsonl \
      --max-new-tokens 256 --batch-size 512 --out real/answers.jsonl
    test -e real/long.jsonl || limited 60 python3 scripts/real_model.py real real/texts --long
    limited 310 python3 -m ladderize sweep benchmarks/real_gpu.yaml
    cp real/gpu/sweep.json "$out/real_cuda.json" ;;
  *) sed -n 2,10p "$0"; exit 2 ;;
esac
exit $failed
