"""The log as tables that SQL reads: ClickHouse, in this process or on a server.

store       where the tables lie, as a contract, and its siblings, directory and server; who may write them
open_store  the one that the settings name
ingest      brings the log into the tables
rebuild     makes them anew
endpoint    answers queries, read-only
questions   views, and queries by name
statements  several statements in one text, one by one
client      a query of a client, to a directory or an endpoint
"""
