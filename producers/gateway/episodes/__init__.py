"""The routes of episodes: start, events, rewards, feedback, end."""
