"""A production trace of requests: read, made up where there is none, and replayed on eviction orders."""
