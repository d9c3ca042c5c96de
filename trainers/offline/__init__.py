"""Training from files alone: no broker, no engine, one process."""
