"""What asynchrony buys: `python -m benchmarks.study_async --help`."""
