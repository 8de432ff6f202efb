"""Reading settings: from a YAML file and overrides to the typed tree, one sentence per problem."""
