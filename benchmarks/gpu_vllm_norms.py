"""Norms stored in float32 in a bfloat16 checkpoint, in vLLM: is their model the one whose norms were cast before?

    python benchmarks/gpu_vllm_norms.py [--hidden-size 1024] [--eager] [--device cuda] [--out FILE]

Fused kernels that expect weights of their input's dtype read float32 ones as garbage (vLLM 44694, 48324). Two random
checkpoints with norms of heads (Qwen3), ladder in all layers, differ in nothing but the dtype in which their norms are
stored. vLLM scores the same prompts with each, in a process of its own, compiled and in CUDA graphs unless --eager;
transformers scores them, too. Ends with 1 where a log-probability of the two differs by more than SAME nats, or the
mean difference from transformers' is more than LIKE.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ladderize.convert.pipeline import convert_checkpoint
from ladderize.layout import Layout
from ladderize.modeling import load
from ladderize.ranks.group import Ranks
from ladderize.runtime.bench.document import environment
from ladderize.vllm.bench import VARIABLES

SAME = 0.02  # nats: two runs of a GPU's own kernels
LIKE = 0.05  # nats: bfloat16 rounded at other places
LAYERS, HEAD_DIM, VOCAB = 4, 64, 2048
PROMPTS = (7, 64, 130)  # tokens


def random_checkpoint(folder: Path, hidden_size: int, norm_dtype: torch.dtype) -> Path:
    """Write a bfloat16 model whose norms' weights no bfloat16 number equals, converted to ladder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=hidden_size // HEAD_DIM // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        initializer_range=0.05,
        dtype="bfloat16",
    )
    model = Qwen3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 1.5)
        weight.data = weight.data.to(norm_dtype if "norm" in name else torch.bfloat16)
    model.save_pretrained(folder / "dense")
    convert_checkpoint(
        folder / "dense", folder / "ladder", Layout.from_layers(LAYERS, ladder=range(LAYERS)), verify=False
    )
    return folder / "ladder"


def by_vllm(folder: Path, prompts: list[list[int]], eager: bool) -> list[float]:
    """Score the prompts' tokens, all prompts in one step. Runs in a process of its own."""
    for name, value in VARIABLES.items():  # vLLM in this process, so that its errors are seen
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams, TokensPrompt

    from ladderize.vllm.plugin import register_plugin

    register_plugin()
    engine = LLM(
        model=str(folder),
        dtype="auto",
        enforce_eager=eager,
        skip_tokenizer_init=True,
        max_model_len=256,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 26,
    )
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    answers = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False)
    return [
        scores[token].logprob
        for ids, answer in zip(prompts, answers, strict=True)
        for token, scores in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)
    ]


def by_transformers(folder: Path, prompts: list[list[int]], device: torch.device) -> list[float]:
    model = load(folder, device=str(device))
    scores = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        with torch.no_grad():
            logs = model(ids).logits[0, :-1].float().log_softmax(-1)
        scores += logs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return scores


def compare(folder: Path, hidden_size: int, eager: bool, device: torch.device) -> dict[str, Any]:
    """Return the differences, in nats."""
    spread = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (length,), generator=spread).tolist() for length in PROMPTS]
    scores = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = random_checkpoint(folder / str(dtype), hidden_size, dtype)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own_process:
            scores[dtype] = torch.tensor(own_process.submit(by_vllm, model, prompts, eager).result())
    reference = torch.tensor(by_transformers(model, prompts, device))
    return {
        "largest_difference_of_cast_before": (scores[torch.float32] - scores[torch.bfloat16]).abs().max().item(),
        "mean_difference_of_transformers": (scores[torch.float32] - reference).abs().mean().item(),
        "tokens": len(reference),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--device", default="cuda", help="transformers'; vLLM takes what it was built for")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu asks vLLM for CPUs")
    with tempfile.TemporaryDirectory() as name:
        found = compare(Path(name), arguments.hidden_size, arguments.eager, device)
    print(json.dumps(found, indent=1))
    if arguments.out:
        machine = environment(Ranks(0, 1, device)).to_dict()
        arguments.out.write_text(json.dumps({"schema_version": 1, "environment": machine, **found}, indent=1) + "\n")
    same, like = found["largest_difference_of_cast_before"], found["mean_difference_of_transformers"]
    if not (same <= SAME and like <= LIKE):  # NaN is neither
        sys.exit("norms stored in float32 are WRONG in vLLM")


if __name__ == "__main__":
    main()
