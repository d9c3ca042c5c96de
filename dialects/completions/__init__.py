"""OpenAI's completions of text."""
