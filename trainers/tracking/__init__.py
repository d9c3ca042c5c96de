"""Where the numbers of a run go: one seam, siblings beside it."""
