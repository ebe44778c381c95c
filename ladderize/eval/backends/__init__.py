"""The model that is scored: transformers or the runtime, in the words of lm-eval."""
