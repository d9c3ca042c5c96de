"""History again: versions proven from the log that trained them, judged anew, learned from, topics made again.

prove          versions trained again, each compared with its record
selection      a question about trajectories -> candidates, and how many were left out for which reason
sql_selection  such a question in SQL
text           replies that the log has as text alone, as samples
rejudge        a verifier over history: `millrace replay reward`
branch         a new policy from history
rebuild        `events` and what follows from it made again from `raw`
"""
