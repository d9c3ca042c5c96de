"""Topics that stages wrote, made again from what the stages read.

law       turns folded again, each record that they give beside the one that lies there
placing   the offsets of records that nobody has any more
spool     what a topic holds once it is made again, until it is written
run       what can be folded, what is refused, and the account of it
command   `millrace replay rebuild`
"""
