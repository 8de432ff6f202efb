"""Writers of samples files, routes files, committed shards, sealed steps and training sets."""
