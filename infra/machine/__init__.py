"""This machine: local services, their supervisor, and what is checked before they start."""
