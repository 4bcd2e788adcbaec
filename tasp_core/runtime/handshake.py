"""The handshake: before each pass all ranks compare, on the host, what each is about to do.

Each rank states its pass as a signature, a dict of texts that must be equal on all ranks: documents,
schedule, shapes, which pass of which call. The ranks exchange digests of their signatures in one small
all-to-all over a gloo group of its own; a GPU is not waited for. Where digests differ, every rank gets
all signatures and raises the same error, which names the ranks that differ and in what.

While digests are on their way ranks may already post messages of the pass. The tags of these messages
begin with a prefix made of the digest, so messages of ranks that do not agree never meet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import torch

from ..errors import PlanError
from .process_group import GroupRank, control_group

SIGNATURE_BYTES = 1 << 15  # of a signature's JSON text as it is told to the other ranks
VALUE_LENGTH = 400  # characters of one value of a signature that are compared
PREFIXES = 1 << 15
REMEMBERED = 4096  # digests that a group has agreed on


class Handshake:
    """The handshakes of one exchange, one after the other: `begin`, then `finish`.

    Attributes:
        tag_prefix: 15 bits, for the tags of this pass's messages; it is taken from the signature's digest.
        known: whether the group has agreed on this signature before, and no other pass can be meant.
        is_open: whether a handshake has begun and not finished.
    """

    def __init__(self, me: GroupRank) -> None:
        self.me = me
        self.tag_prefix, self.known = 0, False
        self._finish: Callable[[], None] | None = None

    @property
    def is_open(self) -> bool:
        return self._finish is not None

    def begin(
        self, signature: Mapping[str, str], error: type[ValueError] = PlanError, *, begins: bool
    ) -> int:
        """Start to compare; arguments and result as those of `Exchange.handshake`.

        Sets `known` and `tag_prefix`, sends this rank's digest to all ranks and does not wait for theirs.
        `finish` does: it raises where digests differ, else it remembers that the group agrees.

        Raises:
            TransportError: the other ranks cannot be reached.
        """
        state = self.me.state
        state.calls += begins
        own = {key: value[:VALUE_LENGTH] for key, value in signature.items()}
        # `known` is about what recurs. The "pass" of a later pass holds the number of its call, which is
        # new each time, so it is left out.
        lasting = own if begins else {k: v for k, v in own.items() if k != "pass"}
        known_as = hashlib.sha256(json.dumps([begins, lasting]).encode()).digest()
        self.known = known_as in state.agreed
        # ranks may run the backward passes of their calls in different orders: messages of a known pass
        # would meet those of another one, unless all passes so far were of the same signature
        self.known = self.known and (begins or state.later_passes == {known_as})
        # what is compared: the number of the call too, so that ranks cannot be in different calls
        text = json.dumps(own | {"call": str(state.calls)} if begins else own).encode()
        self.me.doing = own.get("pass", "a forward pass")
        self.me.doing += f" of call {state.calls}" if begins else ""
        digest = hashlib.sha256(text).digest()
        self.tag_prefix = self.prefix_of(digest)
        digests = torch.frombuffer(bytearray(digest), dtype=torch.uint8).repeat(self.me.size, 1)
        received = torch.empty_like(
            digests
        )  # all-to-all: an all-gather would take n - 1 steps of a ring
        try:
            work = control_group(self.me.group).alltoall_base(received, digests, [], [])
        except RuntimeError as failed:
            what_failed = "meeting the other ranks to compare plans"
            raise self.me.failure(what_failed, failed, collective=True) from failed

        def finish() -> None:
            with self.me.naming(0, "comparing plans with the other ranks"):
                work.wait()
            if own.get("error") or bool((received != digests).any()):
                # messages of this call may stay posted for ever: no later call may use its tag prefix
                if len(state.failed_prefixes) > PREFIXES // 2:
                    state.failed_prefixes.clear()
                state.failed_prefixes.update(
                    [self.prefix_of(row.numpy().tobytes()) for row in received]
                )
                self._raise_difference(text, error)
            state.agreed[known_as] = None
            if not begins and len(state.later_passes) < 2:
                state.later_passes.add(known_as)
            if len(state.agreed) > REMEMBERED:
                state.agreed.pop(next(iter(state.agreed)))

        self._finish = finish
        return state.calls

    def finish(self) -> None:
        """Wait for the comparison; nothing where no handshake is open.

        Raises:
            error of `begin`: on all ranks the same, where they differ or one has an error.
            TransportError: a rank did not take part.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def prefix_of(self, digest: bytes) -> int:
        """The tag prefix of a signature: 15 bits of its digest that no failed handshake has used."""
        failed, prefix = self.me.state.failed_prefixes, int.from_bytes(digest[:2], "big") >> 1
        while prefix in failed:
            prefix = (prefix + 1) % PREFIXES
        return prefix

    def _raise_difference(self, text: bytes, error: type[ValueError]) -> None:
        """Tell each other the signatures, and raise what is wrong with them."""
        own = torch.frombuffer(bytearray(text.ljust(SIGNATURE_BYTES, b"\0")), dtype=torch.uint8)
        everyone = [torch.empty_like(own) for _ in range(self.me.size)]
        with self.me.naming(0, "hearing what the other ranks are about to do"):
            control_group(self.me.group).allgather([everyone], [own]).wait()
        raise error(difference([json.loads(x.numpy().tobytes().rstrip(b"\0")) for x in everyone]))


def difference(signatures: list[dict[str, str]]) -> str:
    """In words: the first rank's error, or in what the ranks' signatures differ.

    >>> difference([{"dtype": "bf16"}, {"dtype": "bf16"}, {"dtype": "fp32"}]).split(". ")[-1]
    'dtype: rank 2 has fp32; the others have bf16.'
    """
    errors = [f"rank {r}: {x['error']}" for r, x in enumerate(signatures) if x.get("error")]
    if errors:
        return errors[0] + (f" (and {len(errors) - 1} more ranks)" if len(errors) > 1 else "")
    lines = []
    for key in {key: None for x in signatures for key in x}:
        values = [x.get(key) for x in signatures]
        # a key that some passes do not have says nothing about them
        if len(set(values)) > 1 and None not in values:
            usual = max(values, key=values.count)
            others = [r for r, v in enumerate(values) if v != usual]
            odd = ", ".join(f"rank {r} has {values[r]}" for r in others[:4])
            lines.append(f"{key}: {odd}; the others have {usual}")
    return (
        "ranks are about to do different things, no result is returned; give every rank the same "
        "documents, options and shapes, and let all call in the same order. "
        + "; ".join(lines)
        + "."
    )
