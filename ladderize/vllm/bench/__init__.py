"""``ladderize bench --engine vllm``: the same harness, where a sample is a request to vLLM's engine."""
