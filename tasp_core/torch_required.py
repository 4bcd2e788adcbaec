"""Importing this module checks torch: one that is missing, or known to be wrong, is refused.

Modules that need tensors import it first: `attention`, `launch`, `shard` and the like, `kernels`. So a
wrong torch is reported before it computes. Planning, proofs and predictions need no torch.
"""

from __future__ import annotations

import re

# the oldest torch that the tests were run with; pyproject.toml declares the same
OLDEST = (2, 9, 1)


def require_torch() -> None:
    """Return if torch is there and at least as new as OLDEST.

    Raises:
        ImportError: torch is missing or too old; says which, and what to install.
    """
    wanted = ".".join(map(str, OLDEST))
    remedy = f"run: pip install 'torch>={wanted}'"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":  # a damaged installation reports itself what is missing
            raise
        raise ImportError(
            "torch is not installed; attention and all that handles tensors need it (plan, check, "
            f"simulate and select do not); {remedy}",
            name="torch",
        ) from None
    installed = str(torch.__version__)
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", installed)
    if numbers is None:
        raise ImportError(
            f"torch's version {installed!r} is no release number; {remedy}", name="torch"
        )
    if tuple(int(x or 0) for x in numbers.groups()) < OLDEST:
        raise ImportError(
            f"torch {installed} is older than {wanted}, the oldest that was tried. The CPU flash kernel of "
            "torch 2.8.0 gives wrong numbers and corrupts memory where query heads share key/value "
            f"heads. Install a newer one; {remedy}",
            name="torch",
        )


require_torch()
