"""A step of a generation: what it reads, what its ranks decide, and what rank 0 publishes."""
