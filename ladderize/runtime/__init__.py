"""The tensor-parallel engine. Imports leaves and convert; neither lm-eval, datasets, PEFT nor Accelerate."""
