"""The log as tables that SQL reads: ClickHouse, in this process or on a server.

columns     columns of a record, generated from its schema
tables      the tables of `millrace_log`, and which records go where
store       where they lie, as a contract; its siblings are directory and server, opened by what the settings say
framing     rows as Avro, made of the log's own bytes
cutting     where a partition is cut into blocks
sorting     which table a record goes to
sound       which rows of a refused block cannot be read
own         rows about the warehouse itself
owner       which namespace the tables of a server belong to
sharing     which partitions this process brings in, where several share a server
fences      what keeps a process out whose partition another one has taken over
ingest      brings the log into the tables
dropping    takes rows out of them, in the order that leaves no hole
sameness    whether a topic is the one that rows came from
rebuild     makes them anew
endpoint    answers queries, read-only
questions   views, and queries by name
"""
