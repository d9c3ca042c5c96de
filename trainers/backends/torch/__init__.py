"""torch: FSDP2, and within a cell of ranks tensor, expert, context and pipeline parallelism."""
