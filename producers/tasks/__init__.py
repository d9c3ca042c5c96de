"""Tasks to roll out: reading them, and keeping a bounded number of them ahead in `<policy>.prompts`."""
