"""Readers of traces. They fetch only the requested samples and layers, and check every byte."""
