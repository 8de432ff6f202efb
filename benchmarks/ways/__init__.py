"""Ways to ship routes: ours, those of peers, plain Parquet files."""
