"""Processes: local services as children, their ports, and what users' settings load into them."""
