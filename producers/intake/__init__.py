"""Events of agents that no model call shows: what passes between an agent and its tools and peers."""
