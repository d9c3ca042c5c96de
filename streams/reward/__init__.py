"""Judging ended episodes: work that waits (sandboxes, provers, judges) kept out of the pure stages.

verifiers  what judges: exact match, math, any module:function
pool       judging in processes with timeouts: a crash costs one verdict
rubric     what a model that judges is asked, and what of its reply is a verdict
asking     a judge behind chat completions
unit_tests which files a task's tests are, and what their end says
running    unit tests in private directories; limited: the script that runs each under limits
choose     a verifier by its name
answered   how far a partition is answered: the offset to commit
judge      an ended episode to a reward event
agents     the one file that knows faust
serve      the process
"""
