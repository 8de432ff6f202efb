"""Prompts: they are read from Parquet files in verl's layout, checked, tokenised and staged.

verl's file                                     staged table (pipeline.run.prompt_table)
prompt: list of {role, content}         ──►     messages (JSON), token_ids (chat template applied)
data_source                             ──►     data_source
reward_model: {ground_truth, ...}       ──►     ground_truth (JSON)
extra_info (may be absent)              ──►     extra_info (JSON or null)
                                                prompt_id: row number of the staged table

Files are read in chunks, so the memory that is needed does not depend on the number of prompts. The
table is written to a temporary file, which staging copies into the store.
"""
