"""The one error of this package: what the caller passed cannot be worked on."""


class KernelInputError(ValueError):
    """Inputs a kernel refuses (shapes, widths, budgets, NaN); the text says what helps."""
