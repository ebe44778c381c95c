"""``adapt --align``: a short alignment before retraining, from whose weights that starts."""

from ladderize.adapt.align.options import AlignOptions, short_tokens
from ladderize.adapt.align.run import Aligning
from ladderize.adapt.blockwise.rewrite import rewrite
from ladderize.adapt.lora.config import ADAPTATION
from ladderize.adapt.retrain.options import RetrainOptions
from ladderize.adapt.retrain.outcome import check_out
from ladderize.blocks import open_checkpoint
from ladderize.console import Console
from ladderize.convert.retraining import read_retrainings
from ladderize.errors import UsageError, UserError
from ladderize.files.finished import EarlierRun
from ladderize.files.regular import resolved
from ladderize.files.work import work_folder
from ladderize.layout import Layout


def aligned_path(out: str) -> str:
    """The checkpoint beside OUT that retraining starts from."""
    return f"{out.rstrip('/')}-aligned"


def start_aligned(
    model: str,
    out: str,
    options: RetrainOptions,
    *,
    overwrite: bool,
    verify: bool,
    revision: str | None,
    console: Console,
) -> str:
    """Align ``model`` on the first data of the retraining, unless an earlier run of the same command did; returns the
    aligned checkpoint beside OUT, which stays: an adapter belongs to it."""
    assert options.distill_from is not None  # options.check()
    checkpoint = open_checkpoint(model, revision)
    if Layout.from_config(checkpoint.config).is_dense:
        raise UserError(f"{model} is dense; there is nothing to align; leave --align out")
    if found := read_retrainings(checkpoint.folder):
        raise UserError(
            f"--align: {model} was retrained already ({found[-1].method}); align before that, or leave --align out"
        )
    data, seq_len = options.data[0].text, options.seq_len
    if options.data[0].is_streamed:
        raise UsageError(f"--align reads --data {data} whole, which is streamed; put a file first, or align beforehand")
    tokens = short_tokens(checkpoint.config)
    asked = AlignOptions(
        data,
        seq_len=seq_len,
        tokens=tokens,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        write=options.write,
    )
    folder = work_folder(out, options.work_dir, checkpoint.folder)
    if not EarlierRun(resolved(out), ADAPTATION, folder, overwrite=overwrite).may_have_finished():
        check_out(out, [checkpoint, open_checkpoint(options.distill_from)], options.method, overwrite=overwrite)
    beside = aligned_path(out)
    console.note(f"aligning first; the result stays in {beside}")
    rewrite(  # whatever a launcher says of FSDP is about the training that follows
        Aligning(),
        model,
        beside,
        options.distill_from,
        asked,
        overwrite=overwrite,
        verify=verify,
        revision=revision,
        console=console,
    )
    return beside
