"""Where learning runs: one seam, siblings beside it."""
