"""Episodes that happened elsewhere: rows, chats, the steps of an episode, and its events."""
