"""What a run tells people: progress, tables, TensorBoard."""
