"""The conformance suite's machinery; its cases are in `tests/conformance`."""
