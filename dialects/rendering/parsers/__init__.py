"""From sampled tokens to the parts of a reply: one parser for each way in which a family writes its calls."""
