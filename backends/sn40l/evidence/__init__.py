"""Published figures: what they are, how close the model comes, and what was fitted on them."""
