"""A rank's part of a Llama in training: its trained weights, adapters and losses."""
