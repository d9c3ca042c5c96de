"""Servers of others: which call goes to which, how it is sent, and how what they answer is read for the log."""
