"""The pages of docs/algorithms: `python -m tests.support.algorithms.pages docs/algorithms` writes them."""
