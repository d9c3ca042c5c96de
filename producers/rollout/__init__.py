"""Rollout workers: take grants, run the agent on each sample, end every episode."""
