"""Methods and measures that work layer by layer: alignment, block distillation, SPD, sensitivity."""
