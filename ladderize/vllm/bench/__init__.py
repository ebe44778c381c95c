"""The command ``ladderize bench --engine vllm``: bench's harness with requests to vLLM's engine as samples."""
