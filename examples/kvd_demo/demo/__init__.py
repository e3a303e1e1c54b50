"""`make demo`: a real daemon, real worker processes, a real model; four stories, measured as you watch."""
