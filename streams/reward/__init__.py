"""Judging ended episodes: work that waits (sandboxes, provers, judges) kept out of the pure stages.

verifiers  what judges: exact match, math, any module:function
pool       judging in processes with timeouts: a crash costs one verdict
answered   how far a partition is answered: the offset to commit
judge      an ended episode to a reward event
agents     the one file that knows faust
serve      the process
"""
