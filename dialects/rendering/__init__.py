"""From messages to token ids and back, behind one interface of ours."""
