"""Who may start, and what may be learned when: the one writer of grants and of the order of learning.

stage      the fold
state      what dispatch remembers
schedule   where batches begin and end, with changing B
admission  when a group may be granted, or unasked-for work taken in
release    when a complete group may be given its seq: one short function a policy
settings   what can be asked for in `decisions`
records    grants and resolutions
"""
