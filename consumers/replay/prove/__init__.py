"""Versions trained again from the log that trained them, each compared with its record.

version_history   what the log says of each version: its weight event, its ledger entry, the order of learning
plan              from which version on, through which steps
same_environment  by what a step here would differ from the recorded one
cell_assignment   which rank trained which groups
step_folder       the exact samples of a step, in a folder
rank_process      the process of a rank
rank_worker       a rank at work: the learner's own trainer, gather and checkpoint, and its micro-batches in files
worker_pool       the processes, formed anew for each stretch of steps
compare           where two versions differ first, and how far
prover            steps trained again, one after the other
command           `millrace replay prove`, also of a dumped step, and the folder in which all of it happens
"""
