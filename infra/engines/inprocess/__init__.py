"""A small engine of our own on torch, for tests and demonstrations, with vLLM's routes."""
