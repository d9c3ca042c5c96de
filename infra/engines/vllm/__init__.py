"""vLLM: its client, its control, and how it is started."""
