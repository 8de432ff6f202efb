"""Reading traces: slices of a sealed step by sample and layer, every byte checked."""
