"""The state of a training run: in memory, on disk, as a change, and as an adapter."""
