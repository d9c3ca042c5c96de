"""One trajectory to read, and where a version, a trajectory or a task comes from and goes to.

find      what an id or a place names
account   all that the log says of one, as plain values: turns, rewards and their fate, lineages, what trained on it
tokens    runs of tokens of one version and one weight in the loss, and their text
tree      the account in a terminal
page      the account as one HTML file that loads nothing
family    which version descends from which, over every policy
ancestry  what led to a version, trajectory or task, and what came of it
branches  that as a tree in a terminal
command   the commands
"""

from millrace.consumers.trajectory.command import lineage, show

__all__ = ["lineage", "show"]
