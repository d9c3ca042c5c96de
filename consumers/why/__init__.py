"""What became of an event, call, session, group or ticket, and why: a reading of the topics, told as a tree.

find      what an id names
story     every record about it, with its place
verdict   what became of it, in one sentence
render    the tree for a terminal
"""

from millrace.consumers.why.command import explain, explain_in

__all__ = ["explain", "explain_in"]
