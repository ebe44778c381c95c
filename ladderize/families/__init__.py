"""The families of models that ladderize supports: docs/families.md, "How to add a family"."""
