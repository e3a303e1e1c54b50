"""Starts one daemon per device, restarts what dies, keeps what must outlive it, and ends with all of them.

Imports neither grpc nor numpy: it has nothing to do but wait. Children get SIGKILL from the kernel should
the supervisor die first (PR_SET_PDEATHSIG).
"""

from kvd_daemon.processes import OPERATOR_MISTAKE

from .loop import Operator, Supervisor

__all__ = ["OPERATOR_MISTAKE", "Operator", "Supervisor"]
