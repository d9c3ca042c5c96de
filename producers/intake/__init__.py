"""Events without a call to answer: what other programs say happened elsewhere."""
