"""The capture gateway: OpenAI chat completions in, exact tokens to the engine, every event to the capture log."""
