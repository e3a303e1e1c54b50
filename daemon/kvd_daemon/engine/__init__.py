"""What the core decided, done: memory, clock, ids, kernel jobs, peers. Knows nothing of the wire."""
