"""Read by every Python that is started with this folder on PYTHONPATH: lets a daemon be killed at a chosen
point of its journal, and its wall clock jump. Both by files in $KVD_CHAOS_DIR, so that a running one obeys.
"""

import os
import sys

if "kvd_daemon.main" in getattr(sys, "orig_argv", ()) and "KVD_CHAOS_DIR" in os.environ:
    import kill_points

    kill_points.install(os.environ["KVD_CHAOS_DIR"])
