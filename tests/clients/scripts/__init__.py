"""Programs as users write them. Each runs in the clients' own environment and fails if an answer is wrong."""
