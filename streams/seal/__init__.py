"""From the history to what learners read: samples are assembled, rewarded, grouped and sealed.

stage     the fold
policies  whom it serves, and by which terms
attempts  what is kept of each attempt and group, and which attempt counts
assemble  calls to exact token traces
rewards   which judgements count, and what they come to
closing   what becomes of a group that is at its end
"""
