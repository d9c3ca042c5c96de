"""A policy and its processes as people see them: read from topics, shown as tables, by `status` and by the demo."""
