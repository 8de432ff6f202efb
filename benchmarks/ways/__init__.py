"""Formats for routes: Retrace's, other frameworks' ("peers"), and plain Parquet files."""
