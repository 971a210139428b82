"""Programs of users: each runs in the clients' own environment against the base URL given to it, and fails if an answer is not right."""
