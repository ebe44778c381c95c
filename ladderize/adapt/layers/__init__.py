"""What is made or measured layer by layer: alignment, block distillation, SPD, sensitivity."""
