"""A new policy from history: no engine, no ticket, no consumer group.

rewards     rewards that a replay gave, by evaluator and rubric
items       candidates -> what a step learns from: samples, groups or pairs
guard       how far the selection is from the starting weights: effective sample size, KL, ratios
job         what a branch is: its algorithm, and everything that must be equal for it to go on
selection_file  the selection beside the versions, so that a resumed branch learns from the same places
records     weight event and ledger entry of a version of a branch
announce    each saved version becomes one of the policy, in one transaction
run         all of it, from the question to the last version
"""
