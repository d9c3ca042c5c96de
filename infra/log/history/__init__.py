"""The history of a policy, read back from the log: the one reader under audit, why, report, status and learner.

kinds     the topics of a policy, and what each holds
rows      one decoded record with its place
reader    rows of a topic or of a stretch of it, a record at a time
follow    rows of what is written from now on
extent    ends of one moment, so that nothing that is pointed at lies beyond them
gaps      ranges that neither a topic nor the archive has, in words
places    trajectories by their places
ledger    the chain of hashes of what trained each version
requests  what a model call was asked, put together
newest    the newest version
"""
