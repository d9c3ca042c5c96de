"""The group of learners: who trains together, with which layout and identity, and where its ranks meet."""
