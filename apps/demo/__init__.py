"""The main job that a newcomer runs first: a tiny model learns through the whole loop while processes are killed."""
