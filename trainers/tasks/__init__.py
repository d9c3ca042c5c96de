"""Tasks that a tiny model can learn. No torch here: verifiers run in the reward stage's processes."""
