"""What daemon and client share: the wire stubs (`kvd.v1`), errors, KV geometry and policies."""
