"""Who speaks: the capture gateway, its client, rollout workers and task loaders."""
