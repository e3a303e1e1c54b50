"""Tensors of torch and arrays of numpy, and nothing else. torch is loaded only where it is used."""

import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from kvd.arguments import one_of
from kvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

FRAMEWORKS = ("torch", "numpy")
GPU_FRAMEWORKS = ("torch", "cupy", "numba")


def framework_name(name: object, choices: Sequence[str] = FRAMEWORKS) -> str:
    """Which kind of tensors is wanted; that of torch only where torch is."""
    framework = one_of("framework", name, choices)
    if framework == "torch":
        try:
            import torch  # noqa: F401 - only whether it is there
        except ImportError:
            raise InvalidArgumentError(
                'framework="torch" needs torch, which is not installed; pass framework="numpy"'
            ) from None
    elif importlib.util.find_spec(framework) is None:
        raise InvalidArgumentError(f'framework="{framework}" needs {framework}, which is not installed')
    return framework


def is_torch(tensor: object) -> "TypeGuard[torch.Tensor]":
    """Whether it is a tensor of torch; without loading torch, since there is none where nobody loaded it."""
    module = sys.modules.get("torch")
    return module is not None and isinstance(tensor, getattr(module, "Tensor", ()))


def tensor_of(name: str, value: Any, needed: object) -> Any:
    """`value`, if it is a numpy array or a torch tensor whose elements can be read. `needed` is the shape,
    for the error's text."""
    if isinstance(value, np.ndarray):
        return value
    if not is_torch(value):
        raise InvalidArgumentError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}; a torch tensor or a numpy "
            f"array {needed} is needed (from_dlpack of torch and of numpy takes those of other frameworks)"
        )
    if value.is_meta or value.is_sparse or value.is_quantized or str(value.layout) != "torch.strided":
        raise InvalidArgumentError(f"{name} is a torch tensor without plain elements; a dense one is needed")
    return value
