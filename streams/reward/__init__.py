"""Judges ended episodes: verifiers in a process pool, driven by faust agents, answers sent to `raw` as events."""
