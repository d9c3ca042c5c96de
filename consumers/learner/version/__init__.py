"""Versions: the order of learning, what a commit carries, their records, files and points of trackers."""
