"""The dimensions over which one model, or one row of tokens, is spread."""
