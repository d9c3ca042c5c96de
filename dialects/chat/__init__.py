"""OpenAI's chat completions."""
