"""The file that ``ladderize sweep --write-example`` writes."""

EXAMPLE = """\
# ladderize demo --quick --out demo
# ladderize sweep examples/sweep.yaml
# The first command makes the model and the data that are named below. Put your own in their place.
# Accuracy against speed of several layouts. Keys below the sections are the options of the commands
# of the same name, with underscores. Paths are relative to the folder in which you run the command.

# A dense checkpoint: a folder or a hub id. Everything is kept in out; a killed sweep goes on from it.
model: demo/dense
out: demo/sweep

# Training data of everything below that names none of its own.
data: demo/train.jsonl

# Measures how much each layer costs. Layouts with a fraction are chosen by it.
sensitivity:
  samples: 32
  seq_len: 128

# A list of values is a grid. The dense model is always measured too.
layouts:
  - ladder: ["4:", all]
  - name: dropped
    spd: all
    sync_tp_size: 2
  - mode: both           # spd, ladder or both: that fraction of the layers, least sensitive first
    fraction: 0.5
    sync_tp_size: 2

# none: as converted. align: least squares, no training. blocks, full, lora: retrained on the dense
# model's outputs. stages: a chain, in which each goes on with what the one before wrote.
adapt:
  - none
  - {method: align, samples: 128, seq_len: 128}
  - stages:
      - {method: align, samples: 128, seq_len: 128}
      - {method: full, max_tokens: [20k], seq_len: 128, batch_size: 8, lr: 0.0001}
  - method: blocks
    layouts: dropped     # only for the entry of this name
    samples: 64
    seq_len: 128
    epochs: 1

# tasks: lm-eval's; perplexity: a text or token ids.
eval:
  perplexity: demo/heldout.jsonl
  seq_len: 128
  batch_size: 16

# Each entry times all layouts, interleaved, at the very end.
bench:
  - tp_size: 2
    prompt_len: 64
    batch_size: [1, 4]
  - emulate_tp: 2
    link: 20,10
    prompt_len: 64

# points of accuracy that may be lost
margin: 1.0
"""
