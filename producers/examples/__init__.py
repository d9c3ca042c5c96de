"""Agents to start from."""
