"""The kernel worker, a disposable process that scores, compacts and scrubs; and the daemon's end of it."""
