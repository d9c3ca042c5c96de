"""SGLang: its server, its client, its control."""
