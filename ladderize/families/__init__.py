"""The families of models that ladderize supports: CONTRIBUTING.md, "How to add a family of models"."""
