"""Recipes, the training loop, checkpoints and tracking."""
