"""The errors a user can cause; each says what was asked, what was found, what to do.

All are `ValueError`s except `TransportError`, which reports a peer that stopped answering.
"""


class PlanError(ValueError):
    """A plan that cannot be built, is wrong, or does not fit the tensors or the group."""


class LayoutError(ValueError):
    """A layout that is unknown, or tensors that do not match it."""


class TopologyError(ValueError):
    """A machine or a ring decomposition that cannot exist."""


class TransportError(RuntimeError):
    """A message that did not arrive; names rank, step, peer and share."""
