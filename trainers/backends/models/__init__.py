"""Models of transformers as every backend trains them: built from a state, run on packed rows."""
