"""The model class, which is copied into every checkpoint: imports torch and transformers only."""
