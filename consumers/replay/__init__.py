"""History again: versions proven from the log that trained them, judged anew, learned from.

recorded  what the log says of each version: its weight event, its ledger entry, the order of learning
plan      from which kept version on, through which steps
same      by what a step here would differ from the recorded one
shares    which rank trained which groups
material  the exact samples of a step, in a folder
orders    what the ranks are told
process   the process that a rank is
work      a rank at work: the learner's own trainer, gather and checkpoint
packed    the micro-batches of a step as they trained
crew      the processes, formed anew for each stretch of steps
compare   where two versions differ first, and how far
prove     steps trained again, one after the other, each compared with its record
dump      a step as a folder that trains without the log
load      such a step trained again
private   the folder in which all of it happens
command   `millrace replay prove`
eligible  what may be used of history at all
selection a question about trajectories -> candidates, and how many were left out for which reason
asked     such a question in SQL
reward    a verifier over history
again     `millrace replay reward`
branch    a new policy from history
"""
