"""The two clocks of health: how long the event loop was stuck, how long a kernel worker was silent."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
from hypothesis import given
from hypothesis import strategies as st
from tests.running_kvd import eventually

from kvd_daemon.engine.stalls import TICK_S, WINDOW_S, Stalls
from kvd_daemon.kernel.vigil import MAX_CHARGE_S, Vigil


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0, 5)), min_size=1, max_size=40))
def test_the_longest_stall_of_the_last_minute_is_told(seen: list[tuple[float, float]]) -> None:
    stalls, now_s, history = Stalls(), 0.0, []
    for pause_s, late_s in seen:
        now_s += pause_s
        stalls.note(now_s, late_s)
        history.append((now_s, late_s))
        assert stalls.longest_s == max(late for when, late in history if when >= now_s - WINDOW_S)


def test_a_loop_that_was_stuck_is_late_by_that_much() -> None:
    async def story() -> float:
        stalls = Stalls()
        ticking = asyncio.create_task(stalls.tick())
        await asyncio.sleep(0)
        stuck_until = time.monotonic() + 3 * TICK_S
        while time.monotonic() < stuck_until:
            pass
        await ticking
        return stalls.longest_s

    assert asyncio.run(story()) >= 2 * TICK_S


def python(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", code])


def test_a_stopped_worker_is_charged_the_time_that_passes() -> None:
    with python("import time; time.sleep(60)") as process:
        try:
            os.kill(process.pid, signal.SIGSTOP)
            eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "a stop")
            vigil = Vigil(process.pid, 100.0)
            assert vigil.look(100.5) == 0.5
            assert vigil.look(101.0) == 1.0
            vigil.heard()
            assert vigil.look(101.25) == 0.25
            assert vigil.stopped_s == 1.25, "a word that was on its way does not say that it goes on"
            os.kill(process.pid, signal.SIGCONT)
            eventually(lambda: psutil.Process(process.pid).status() != psutil.STATUS_STOPPED, "its going on")
            vigil.look(101.5)
            assert vigil.stopped_s == 0.0
        finally:
            process.kill()


def test_a_worker_that_waits_is_charged_too_and_one_that_runs_only_what_it_got() -> None:
    with python("import os; os.read(os.pipe()[0], 1)") as waiting, python("while True: pass") as running:
        try:
            eventually(lambda: psutil.Process(waiting.pid).status() == psutil.STATUS_SLEEPING, "a read")
            assert Vigil(waiting.pid, 0.0).look(0.5) == 0.5
            eventually(lambda: psutil.Process(running.pid).status() == psutil.STATUS_RUNNING, "a loop")
            vigil, silence_s = Vigil(running.pid, 0.0), 0.0
            for look in range(1, 101):
                silence_s = vigil.look(float(look))
            times = psutil.Process(running.pid).cpu_times()
            assert silence_s <= times.user + times.system
        finally:
            waiting.kill()
            running.kill()


def test_a_daemon_that_was_stopped_itself_holds_nothing_against_its_worker() -> None:
    with python("import time; time.sleep(60)") as process:
        try:
            eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING, "a sleep")
            assert Vigil(process.pid, 0.0).look(3600.0) == MAX_CHARGE_S
        finally:
            process.kill()


def test_a_worker_that_is_gone_is_charged_the_time_until_its_socket_says_so() -> None:
    with python("pass") as process:
        process.wait()
    assert Vigil(process.pid, 0.0).look(0.5) == 0.5
