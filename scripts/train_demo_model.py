"""Train the demo's tiny Llama and its tokenizer; writes ladderize/demo/model and the log beside this file.

    python scripts/train_demo_model.py            # seed 0; 42 minutes on 2 cores busy with other work too, see the log

The result is committed, so nobody has to run this. It is here so that anybody can see where the weights come
from. Not bit-reproducible across machines (floating-point sums depend on the number of threads).

Another shape, on prose in the place of the demo's texts (benchmarks/recovery.py --prose):

    python scripts/train_demo_model.py --text ../shared/fixtures/wikitext-2/test.txt --layers 16 --hidden-size 96 \
        --intermediate-size 256 --heads 6 --repeat-kv --steps 1200 --out prose --log prose.log

The same recipe for another family (docs/results.md, "Tiny models"; not shipped):

    python scripts/train_demo_model.py --family qwen3 --out qwen3 --log qwen3.log
    python scripts/train_demo_model.py --family gemma3_text --steps 1600 --out gemma --log gemma.log \
        --more '{"sliding_window": 32, "query_pre_attn_scalar": 16}'
    python scripts/train_demo_model.py --family exaone4 --steps 1600 --out exaone --log exaone.log \
        --more '{"sliding_window": 32}'
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ladderize.demo.corpus import documents
from ladderize.families.supported import SUPPORTED

ROOT = Path(__file__).resolve().parent.parent
BOS, EOS = "<s>", "</s>"
CONFIG = {
    "vocab_size": 768, "max_position_embeddings": 512, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits: every string survives encode and decode."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=512)


def repeat_kv(model: PreTrainedModel) -> PreTrainedModel:
    """The same function with a key-value head for each query head."""
    config = copy.deepcopy(model.config)
    config.num_key_value_heads = config.num_attention_heads
    times = config.num_attention_heads // model.config.num_key_value_heads
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = weight.unflatten(0, (model.config.num_key_value_heads, -1))
            weights[name] = heads.repeat_interleave(times, 0).flatten(0, 1)
    repeated = type(model)(config)
    repeated.load_state_dict(weights)
    return repeated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--documents", type=int, default=250_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=[family.model_type for family in SUPPORTED], default="llama")
    parser.add_argument("--more", type=json.loads, default={}, help="more keys of its config, as JSON")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--intermediate-size", type=int, default=320)
    parser.add_argument("--heads", type=int, default=8, help="half as many for keys and values")
    parser.add_argument("--repeat-kv", action="store_true", help="write key-value heads twice, for more ranks")
    parser.add_argument("--text", type=Path, help="train on the lines of this file")
    parser.add_argument("--out", type=Path, default=ROOT / "ladderize" / "demo" / "model")
    parser.add_argument("--log", type=Path, default=ROOT / "scripts" / "train_demo_model.log")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    if args.text:
        texts = [line.strip() for line in args.text.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        texts = list(documents(args.documents, test=False, seed=args.seed))
    tokenizer = train_tokenizer(texts[:50_000], CONFIG["vocab_size"])

    # one stream "<s> document </s> <s> document </s> ...", cut into rows that all begin with <s>
    stream = [token for row in tokenizer(texts)["input_ids"] for token in (*row, 1)]
    rows = torch.tensor(stream[: len(stream) // args.seq_len * args.seq_len], dtype=torch.int16).view(-1, args.seq_len)

    shape = {
        "hidden_size": args.hidden_size,
        "intermediate_size": args.intermediate_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.heads // 2,
        "head_dim": args.hidden_size // args.heads,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(args.family, **CONFIG, **shape, **args.more))
    parameters = sum(p.numel() for p in model.parameters())
    decay = [p for p in model.parameters() if p.ndim > 1]
    other = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(0.9, 0.98),
    )
    warmup = 200

    def schedule(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / args.steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    args.log.parent.mkdir(parents=True, exist_ok=True)
    with args.log.open("w") as log:

        def report(**values: object) -> None:
            print(json.dumps(values), file=log, flush=True)
            print(values, flush=True)

        report(
            parameters=parameters,
            tokens=rows.numel(),
            torch=torch.__version__,
            **{k: str(v) for k, v in vars(args).items() if k not in ("out", "log")},
        )
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed))
        start, loss_sum = time.time(), 0.0
        for step in range(args.steps):
            picked = [(step * args.batch_size + i) % len(rows) for i in range(args.batch_size)]
            batch = rows[order[picked]].long()
            batch[:, 0] = 0
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            loss_sum += loss.item()
            if (step + 1) % 100 == 0:
                report(step=step + 1, loss=round(loss_sum / 100, 4), seconds=round(time.time() - start))
                loss_sum = 0.0
            if (step + 1) % 1000 == 0 or step + 1 == args.steps:
                written = repeat_kv(model) if args.repeat_kv else copy.deepcopy(model)
                written.to(torch.bfloat16).save_pretrained(args.out)
                tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
