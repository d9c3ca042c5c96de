"""How an upstream's answers are read for the log, from a copy, while their bytes go on to the client."""
