"""What ladderize knows of each family of models: docs/design.md, "How to add a family of models"."""
