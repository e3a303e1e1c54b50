"""Order and time of work on a GPU."""

from ctypes import c_float, c_void_p

from kvd_cuda.driver.devices import Gpu

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no hidden order with the default stream
DEFAULT = 0  # CU_EVENT_DEFAULT


class Stream:
    """Work of one stream is done in order. `handle` is what `Function.launch` takes."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, stream = gpu, c_void_p()
        with gpu.context():
            gpu.driver.call("cuStreamCreate", stream, NON_BLOCKING)
        assert stream.value is not None, "a new stream has a handle"
        self.handle = stream.value

    def copy_in(self, target: int, source: int, byte_count: int) -> None:
        """From host address `source`, which must stay until the stream was waited for."""
        self._copy("cuMemcpyHtoDAsync_v2", target, source, byte_count)

    def copy_out(self, target: int, source: int, byte_count: int) -> None:
        """To host address `target`; the bytes are there once the stream was waited for."""
        self._copy("cuMemcpyDtoHAsync_v2", target, source, byte_count)

    def copy(self, target: int, source: int, byte_count: int) -> None:
        """Within the GPU's memory."""
        self._copy("cuMemcpyDtoDAsync_v2", target, source, byte_count)

    def _copy(self, call: str, target: int, source: int, byte_count: int) -> None:
        with self._gpu.context():
            self._gpu.driver.call(call, target, source, byte_count, self.handle)

    def synchronize(self) -> None:
        """Returns when everything in it is done. Raises CudaError of whatever failed in it."""
        synchronize(self._gpu, self.handle)

    def destroy(self) -> None:
        """What is in it is still done."""
        with self._gpu.context():
            self._gpu.driver.call("cuStreamDestroy_v2", self.handle)


class Event:
    """A moment in a stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._event = gpu, c_void_p()
        with gpu.context():
            gpu.driver.call("cuEventCreate", self._event, DEFAULT)

    def record(self, stream: int = 0) -> None:
        """It is the moment when all that is in the stream by now is done."""
        with self._gpu.context():
            self._gpu.driver.call("cuEventRecord", self._event, stream)

    def since_ms(self, earlier: "Event") -> float:
        """Milliseconds from that one to this one; waits for this one."""
        elapsed = c_float()
        with self._gpu.context():
            self._gpu.driver.call("cuEventSynchronize", self._event)
            self._gpu.driver.call("cuEventElapsedTime", elapsed, earlier._event, self._event)
        return elapsed.value

    def destroy(self) -> None:
        with self._gpu.context():
            self._gpu.driver.call("cuEventDestroy_v2", self._event)


def synchronize(gpu: Gpu, stream: int) -> None:
    """As `Stream.synchronize`, of a stream that somebody else made (torch, cupy); 0 is the default one."""
    with gpu.context():
        gpu.driver.call("cuStreamSynchronize", stream)
