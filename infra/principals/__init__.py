"""Keys of clients as records of the log: who a key is, and whether it may be used now."""
