"""Calls of a model: which policy and engine answers, with which prompt and sampling, and its record."""
