"""Calls in one API answered by upstreams of another."""
