"""Spans of OpenTelemetry: what they say of model calls, tools and judgements, and the episode that they are."""
