"""Alignment: projections solved anew by least squares, layer by layer, without gradients (docs/align.md)."""
