"""History again: versions proven from the log that trained them, judged anew, learned from.

recorded          what the log says of each version: its weight event, its ledger entry, the order of learning
plan              from which version on, through which steps
same_environment  by what a step here would differ from the recorded one
cell_assignment   which rank trained which groups
material          the exact samples of a step, in a folder
orders            what the ranks are told
rank_process      the process that a rank is
rank_worker       a rank at work: the learner's own trainer, gather and checkpoint, and its micro-batches in files
worker_pool       the processes, formed anew for each stretch of steps
compare           where two versions differ first, and how far
prove             steps trained again, one after the other, each compared with its record
dump              a step as a folder that trains without the log
scratch_folder    the folder in which all of it happens
command           `millrace replay prove`, also of a dumped step
selection         a question about trajectories -> candidates, and how many were left out for which reason
sql_selection     such a question in SQL
reward            a verifier over history
rejudge           `millrace replay reward`
branch            a new policy from history
"""
