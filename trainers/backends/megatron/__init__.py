"""Megatron-core behind the seam of backends: data, tensor with sequence, pipeline, context and expert parallelism, and
its distributed optimizer. Megatron is imported when a backend forms, never before."""
