"""The cases, one module a family; `all_cases` of the campaign puts them together."""
