"""Writing: samples and routes to files, files to committed shards, shards to sealed steps."""
