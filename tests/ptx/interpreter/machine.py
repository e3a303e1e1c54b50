"""Launches kernels: many blocks at a time, threads in lock step with all others at the same instruction."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import arithmetic, conversions, matrices, memory_access, warps  # noqa: F401  fill the registry
from .errors import PtxError
from .memory import GlobalMemory
from .program import Instruction, Kernel, Program
from .registry import OPERATIONS
from .threads import WARP, Launch, Threads

Array = NDArray[Any]
THREADS_AT_ONCE = 8192  # threads of the blocks that run together: numpy's overhead is small beside the work


class Machine:
    """A device: its memory, and how many barriers its launches have passed."""

    def __init__(self, memory_bytes: int = 1 << 22) -> None:
        self.memory = GlobalMemory(memory_bytes)
        self._epoch = 0

    def launch(
        self,
        program: Program,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        arguments: tuple[int | float, ...],
    ) -> None:
        """Run one kernel to its end; PtxError for whatever a GPU would not define."""
        kernel = program.kernels[name]
        if len(arguments) != len(kernel.parameters):
            raise PtxError(f"{name} takes {len(kernel.parameters)} arguments, not {len(arguments)}")
        launch = Launch(program, kernel, grid, threads, arguments, self.memory, self._epoch)
        blocks = np.arange(grid[0] * grid[1] * grid[2])
        at_once = max(1, THREADS_AT_ONCE // threads)
        latest = self._epoch
        for start in range(0, blocks.size, at_once):
            running = _Run(Threads(launch, blocks[start : start + at_once]))
            running.to_the_end()
            latest = max(latest, int(running.threads.epoch.max()))
        self._epoch = latest + 1


class _Run:
    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self._kernel: Kernel = threads.launch.kernel
        self._joins = frozenset(self._kernel.labels.values())

    def to_the_end(self) -> None:
        threads = self.threads
        with np.errstate(all="ignore"):
            while not threads.exited.all():
                runnable = ~threads.exited & ~threads.waiting
                if not runnable.any():
                    raise PtxError("some threads wait at a barrier that others never reach")
                pc = int(threads.pc[runnable].min())
                self._straight_on(pc, runnable & (threads.pc == pc))

    def _straight_on(self, pc: int, group: Array) -> None:
        """Run `group` from `pc` to where threads may part or meet."""
        while True:
            instruction = self._kernel.code[pc]
            active = self._guarded(instruction, group)
            try:
                if self._flow(instruction, pc, group, active):
                    return
                if active.any():
                    self._operation(instruction)(self.threads, instruction, active)
            except PtxError as error:
                raise PtxError(f"{error}\n  {self._kernel.name}: {instruction.text}") from None
            pc += 1
            if pc in self._joins:
                self.threads.pc[group] = pc
                return

    def _guarded(self, instruction: Instruction, group: Array) -> Array:
        if instruction.guard is None:
            return group
        name, wanted = instruction.guard
        guarded: Array = group & (self.threads.predicate(name) == wanted)
        return guarded

    def _operation(self, instruction: Instruction) -> Any:
        if instruction.opcode not in OPERATIONS:
            raise PtxError(f"{instruction.opcode} is not modelled")
        return OPERATIONS[instruction.opcode]

    def _flow(self, instruction: Instruction, pc: int, group: Array, active: Array) -> bool:
        """Whether this instruction moves, stops or ends threads; if so it has been done."""
        threads = self.threads
        if instruction.opcode == "bra":
            threads.pc[group] = pc + 1
            threads.pc[active] = self._kernel.labels[instruction.operands[0].name]  # type: ignore[union-attr]
        elif instruction.opcode in ("ret", "exit"):
            threads.pc[group] = pc + 1
            threads.exited |= active
            if (threads.waiting & self._same_block(active)).any():
                raise PtxError("a thread ends while others of its block wait at a barrier")
        elif instruction.opcode in ("bar", "barrier"):
            threads.pc[group] = pc + 1
            self._arrive(active)
        else:
            return False
        return True

    def _same_block(self, active: Array) -> Array:
        same: Array = np.isin(self.threads.local_block, self.threads.local_block[active])
        return same

    def _arrive(self, active: Array) -> None:
        threads = self.threads
        if (threads.exited & self._same_block(active)).any():
            raise PtxError("barrier in a block of which a thread has ended")
        threads.waiting |= active
        complete: Array = np.all(threads.waiting.reshape(threads.epoch.size, -1), axis=1)
        released = complete[threads.local_block]
        self._refuse_parted_warps(released)
        threads.epoch += complete
        threads.waiting &= ~released

    def _refuse_parted_warps(self, released: Array) -> None:
        """bar.sync is an aligned instruction: a warp's lanes must wait at the same one."""
        width = min(WARP, self.threads.launch.threads)
        places = self.threads.pc.reshape(-1, width)
        if ((places != places[:, :1]) & released.reshape(-1, width)).any():
            raise PtxError("lanes of one warp wait at different barriers")
