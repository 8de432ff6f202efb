"""Routes to measure on: recorded, freshly generated, drawn."""
