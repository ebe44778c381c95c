"""Statistics of two models' answers to the same questions, on stored samples."""
