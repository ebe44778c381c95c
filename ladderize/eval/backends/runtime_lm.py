"""The tensor-parallel runtime for lm-eval's own command line: ``lm_eval --model ladderize``."""

from typing import Any

from lm_eval.api.registry import register_model

from ladderize.errors import UserError
from ladderize.eval.backends.lm import AnsweringLM
from ladderize.eval.backends.runtime import RuntimeModel
from ladderize.modeling import load_tokenizer
from ladderize.ranks.device import default_device
from ladderize.runtime.requests.options import RequestOptions
from ladderize.runtime.requests.service import check_request


@register_model("ladderize")
class RuntimeLM(AnsweringLM):
    """A ladderized or plain Llama on ``tp_size`` processes, for lm-eval.

    pretrained: a folder or a hub id. batch_size: texts that are continued at a time. options: the other fields of
    ``RequestOptions``, which are as lm-eval's HF backend takes them. Raises UserError, also for an argument that is not
    known.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **options: Any,
    ) -> None:
        if unknown := options.keys() - (RequestOptions.__dataclass_fields__.keys() - {"rows"}):
            raise UserError(f"the model ladderize has no argument {min(unknown)!r}; leave it out of --model_args")
        rows = RequestOptions.rows if batch_size is None or str(batch_size).startswith("auto") else int(batch_size)
        # lm-eval's command line says cuda:0 where nothing was said, and its HF backend takes the CPU where it has none
        device = (device or default_device()).partition(":")[0]
        chosen = RequestOptions(rows=rows, device=default_device() if device == "cuda" else device, **options)
        spec = check_request(str(pretrained), chosen)
        assert spec.folder is not None
        more: dict[str, Any] = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
        tokenizer = load_tokenizer(spec.folder, trust_remote_code=chosen.trust_remote_code, **more)
        if tokenizer is None:
            raise UserError(f"{spec.name} has no tokenizer, and lm-eval's tasks are text")
        super().__init__(RuntimeModel(spec, chosen, tokenizer), add_bos_token, prefix_token_id)
