"""``ladderize convert``, then ``vllm serve``: what a user types, with no --trust-remote-code."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import ladderize
from tests.helpers import ROOT, all_gone, clearly_chosen, invoke_well, randomise
from tests.vllm.engines import SEGMENT_FOLDER
from tests.vllm.models import SHAPE, random_prompts
from tests.warm import PATIENCE, free_port

COMMAND = Path(sys.executable).with_name("vllm")


def save_source(folder: Path) -> None:
    """A Llama with a tokenizer of one word for each id."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    randomise(model, int(torch.randint(1 << 30, ())))
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(SHAPE["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", bos_token="w1").save_pretrained(folder)


@contextlib.contextmanager
def served(model: Path, log: Path, *options: object) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of a server with this model, once it is ready."""
    port = free_port()
    arguments = ["serve", model, "--host", "127.0.0.1", "--port", port, *options]
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join((cores * 2)[:2]),
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [COMMAND, *map(str, arguments)],
            cwd=log.parent,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline, log.read_text()[-6000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(0.5)
        yield address, process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)


def post(address: str, **document: Any) -> Any:
    request = urllib.request.Request(
        address, data=json.dumps(document).encode(), headers={"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=PATIENCE)


def processes_of_group(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == leader:
                    found.append(int(entry.name))
    return found


def test_convert_and_serve(tmp_path):
    """Two ranks, compiled, with the server's defaults: an answer at once, the same as a stream, and a clean end."""
    save_source(tmp_path / "source")
    invoke_well(
        *("convert", tmp_path / "source", tmp_path / "out", "--ladder", "1:", "--spd", "0:2", "--sync-tp-size", 2)
    )
    ladderize.register()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    prompt, expected = [], []
    while not expected or not clearly_chosen(model, prompt, expected):
        (prompt,) = random_prompts(20)
        with torch.no_grad():
            text = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
        expected = text[len(prompt) :]
    words = [f"w{token}" for token in expected]

    options = ("--tensor-parallel-size", 2, "--dtype", "float32", "--block-size", 32, "--served-model-name", "ladder")
    with served(tmp_path / "out", tmp_path / "server.log", *options) as (address, process):
        request = {"model": "ladder", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        request["skip_special_tokens"] = False  # w0 and w1 may be among the answer
        with post(f"{address}/v1/completions", **request, prompt=prompt) as answer:
            assert json.load(answer)["choices"][0]["text"].split() == words
        # longer: a server that has waited for a core sends all that is there by then as one piece
        request |= {"max_tokens": 128, "stream": True}
        with post(f"{address}/v1/completions", **request, prompt=prompt) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            events = [line.decode().removeprefix("data: ").strip() for line in answer if line.startswith(b"data: ")]
        assert events.pop() == "[DONE]"
        pieces = [choice["text"] for event in events for choice in json.loads(event)["choices"]]
        streamed = "".join(pieces).split()
        assert (streamed[: len(words)], len(streamed)) == (words, 128)
        assert len(pieces) > 1  # not all at once; a slow reader is given several tokens together

        members = processes_of_group(process.pid)
        assert len(members) >= 4  # the server, its engine, two workers
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) in (0, -signal.SIGTERM), (tmp_path / "server.log").read_text()[-4000:]
        assert all_gone(members)
    log = (tmp_path / "server.log").read_text()
    assert "Resolved architecture: LadderizedLlamaForCausalLM" in log
    # vLLM gives its engine no time to end, and may log that it is dead: that is not ours
    assert not re.search(r'File ".*ladderize/(vllm|runtime|ranks)/', log[log.rindex("/v1/completions") :])
    left = [path for number in members for path in SEGMENT_FOLDER.glob(f"ladderize-{number}-*")]
    assert not left, "shared memory of ladderize is left"
