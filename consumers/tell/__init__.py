"""What the log says of a policy, an episode or a record, for people: read once, and shown in several ways.

topics        the topics of one policy, by what a record is about
subject       what an id or a place names
story         every record about it, and what became of it, in one sentence
events        what an event says
account       one trajectory as plain values
lineage       what led to a version, trajectory or task, and what came of it
summary       what a policy's records come to; faults: what went wrong on the way
status        how a policy and its processes are now

trees, lineage_tree, charts, pages, notation   how they are shown
command       `why`, `trajectory`, `lineage`, `report`
"""
