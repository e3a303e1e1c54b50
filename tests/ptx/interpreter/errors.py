"""What a kernel did wrong."""


class PtxError(Exception):
    """A kernel did what a GPU would not define, or used an instruction that is not modelled."""
