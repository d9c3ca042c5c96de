"""Roles by name. Cheap to import."""

from __future__ import annotations

ACTOR, CRITIC, REFERENCE, TEACHER, REWARD_MODEL = "actor", "critic", "reference", "teacher", "reward_model"
FROZEN = (REFERENCE, TEACHER, REWARD_MODEL)
ROLES = (ACTOR, CRITIC, *FROZEN)
"""Roles that a backend's models play. The first two learn."""
