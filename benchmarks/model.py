"""What a layout costs in a single-device forward pass: layouts against the dense Llama, in one run, interleaved.

    python benchmarks/model.py [--device cuda] [--dtype bfloat16] [--out FILE]

On one device nothing is communicated, so this shows no speed-up: it shows that a converted model costs what its source
costs (overlapped layouts: the same products in another order; dropped ones: the same products, the norms once per
virtual rank). First every layout is checked: against an fp32 computation of the same weights by the slow way, in which
each rank calls whole modules with masked inputs.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

from ladderize.convert.remote_code import modeling_ladderized as modeling
from ladderize.convert.remote_code.configuration_ladderized import LadderizedLlamaConfig
from ladderize.layout import Layout
from ladderize.runtime.bench.rounds import synchronize

FIGURES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES = {
    name: dict(zip(FIGURES, values, strict=True))
    for name, values in {
        "small": (512, 1408, 4, 8, 8),
        "1b": (2048, 8192, 16, 32, 8),
        "8b": (4096, 14336, 32, 32, 8),
    }.items()
}


def layouts(layers: int) -> dict[str, Layout]:
    every = range(layers)
    return {
        "dense": Layout.dense(layers),
        "ladder": Layout.from_layers(layers, ladder=every),
        "spd 2": Layout.from_layers(layers, spd=every, sync_tp_size=2),
        "spd 8": Layout.from_layers(layers, spd=every, sync_tp_size=8),
        "spd 8 + ladder": Layout.from_layers(layers, spd=every, ladder=every, sync_tp_size=8),
    }


def config_of(shape: str, layout: Layout, layers: int, **extra: object) -> LadderizedLlamaConfig:
    sizes = {**SHAPES[shape], "num_hidden_layers": layers}
    return LadderizedLlamaConfig(vocab_size=32000, max_position_embeddings=8192, **sizes, **layout.to_config(), **extra)


def build(shape: str, layout: Layout, layers: int, device: str, dtype: torch.dtype, shared=None, **extra):
    with torch.device("meta"):
        model = modeling.LadderizedLlamaForCausalLM(config_of(shape, layout, layers, **extra))
    rotary = type(model.model.rotary_emb)(config=model.config)  # its buffers are computed, not stored
    if shared is None:
        shared = {name: torch.randn(p.shape, device=device, dtype=dtype) * 0.02 for name, p in model.named_parameters()}
        for name, weight in shared.items():
            if "norm" in name:
                weight.fill_(1.0)
    model.load_state_dict(shared, assign=True)
    model.model.rotary_emb = rotary.to(device)
    return model.eval().requires_grad_(False), shared


def check(shape: str, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative error of the logits of each layout against fp32 and the slow way; raises if one is out of bounds."""
    bound = 1e-4 if dtype == torch.float32 else 0.05
    ids = torch.randint(0, 32000, (2, 48), device=device)
    errors = {}
    for name, layout in layouts(2).items():
        model, weights = build(shape, layout, 2, device, dtype)
        exact_weights = {name: weight.float() for name, weight in weights.items()}
        reference, _ = build(shape, layout, 2, device, torch.float32, exact_weights, attn_implementation="eager")
        for module in reference.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda *_: None)  # hooked modules are called whole, once for each rank
        with torch.inference_mode():
            exact, found = reference(ids).logits, model(ids).logits.float()
        errors[name] = float((found - exact).norm() / exact.norm())
        if not errors[name] <= bound:
            sys.exit(f"{name}: relative error {errors[name]:.2g} of the logits is over {bound}")
    return errors


def timed(model, ids, repeat: int, device: str) -> float:
    """Milliseconds of one forward pass without a cache; of a single token it reads every weight once, as decoding
    does."""
    synchronize(torch.device(device))
    start = time.perf_counter()
    for _ in range(repeat):
        with torch.inference_mode():
            model(ids, use_cache=False)
    synchronize(torch.device(device))
    return (time.perf_counter() - start) / repeat * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--shape", choices=SHAPES, default="8b" if torch.cuda.is_available() else "small")
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    errors = check("small", args.device, dtype)
    layers = SHAPES[args.shape]["num_hidden_layers"]
    shared, models = None, {}
    for name, layout in layouts(layers).items():
        models[name], shared = build(args.shape, layout, layers, args.device, dtype, shared)
    prompt = torch.randint(0, 32000, (1, args.prompt_len), device=args.device)
    phases = {"prefill_ms": (prompt, 1), "decode_ms_per_token": (prompt[:, :1], 8)}
    samples = {phase: {name: [] for name in models} for phase in phases}
    for round_ in range(args.rounds + 2):
        for phase, (ids, repeat) in phases.items():
            for name, model in models.items():
                value = timed(model, ids, repeat, args.device)
                if round_ >= 2:  # two rounds of warm-up are not counted
                    samples[phase][name].append(value)
    device = (
        torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
    )
    print(f"{args.shape}, {args.dtype}, {args.device} ({device}), prompt {args.prompt_len}, median of {args.rounds}")
    print(f"{'layout':16}{'rel. error':>12}{'prefill ms':>12}{'vs dense':>10}{'decode ms':>12}{'vs dense':>10}")
    medians = {
        phase: {name: statistics.median(values) for name, values in by_name.items()}
        for phase, by_name in samples.items()
    }
    for name in models:
        prefill, decode = (medians[phase][name] for phase in phases)
        base_prefill, base_decode = (medians[phase]["dense"] for phase in phases)
        print(
            f"{name:16}{errors[name]:>12.2g}{prefill:>12.2f}{prefill / base_prefill:>9.3f}x"
            f"{decode:>12.2f}{decode / base_decode:>9.3f}x"
        )
    if args.out:
        record = {
            "schema_version": 1,
            "device": device,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "options": {k: str(v) for k, v in vars(args).items()},
            "relative_error": errors,
            "samples": samples,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
