"""What happened elsewhere, without a call to answer: between an agent and its tools and peers, and in spans."""
