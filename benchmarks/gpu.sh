#!/usr/bin/env bash
# Everything that needs a GPU, in two calls of at most 9 minutes each: correctness first, then times; and with the argument
# vllm the five engines of gpu_vllm.py, which take a minute or more each to compile and capture.
# Needs torch, transformers, accelerate, peft, typer, rich and PyYAML; no network, no lm-eval. JSON goes to ${OUT:-benchmarks/results}.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}
mkdir -p "$out"
export PYTHONPATH=. HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 -c 'import torch, transformers; assert torch.cuda.is_available(), "no GPU here"; print(torch.cuda.get_device_name(), torch.__version__, transformers.__version__)'
if [ "${1:-}" = vllm ]; then
  exec timeout 530 python3 benchmarks/gpu_vllm.py --num-layers 16 --out "$out/vllm_cuda.json"
fi
timeout 110 python3 -m pytest -q tests/test_gpu.py || echo "GPU TESTS FAILED (the times below are worth little)"
timeout 60 python3 benchmarks/model.py --device cuda --dtype bfloat16 --shape 8b --out "$out/model_cuda.json" || echo "model.py FAILED"
timeout 75 python3 benchmarks/gpu_spd.py --out "$out/spd_cuda.json" || echo "gpu_spd.py FAILED"
timeout 75 python3 benchmarks/gpu_adapt.py --out "$out/adapt_cuda.json" || echo "gpu_adapt.py FAILED"
timeout 90 python3 benchmarks/gpu_domino.py --out "$out/domino_cuda.json" || echo "gpu_domino.py FAILED"
timeout 125 python3 benchmarks/gpu_runtime.py --out "$out/runtime_cuda.json"
