"""The families of models that ladderize supports: docs/design.md, "How to add a family of models"."""
