"""Policy losses, which `loss_table` lists, and the aggregation of token losses into one number."""
