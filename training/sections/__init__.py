"""The sections of a recipe, a file each. Nothing here imports torch."""
