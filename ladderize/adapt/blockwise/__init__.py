"""What works layer by layer on kept states: block-to-block distillation, head grouping, the run that align shares."""
