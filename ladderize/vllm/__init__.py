"""Converted models in vLLM: ``vllm serve OUT --tensor-parallel-size 8``.

vLLM finds ``plugin.register_plugin`` by its entry point. Only this folder imports vLLM.
"""
