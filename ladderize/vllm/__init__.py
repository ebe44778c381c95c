"""Models in vLLM, which finds ``plugin.register_plugin`` by its entry point. Only this folder imports vLLM."""
