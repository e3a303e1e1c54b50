"""A machine with fake GPUs: `FakeGpus` is its folder and what processes on it have in their environment."""

from .machine import FakeGpus, fake_gpus

__all__ = ["FakeGpus", "fake_gpus"]
