"""The cases, one module per family; `tests.hostile.campaign.all_cases` collects them."""
