"""Run a program by what its instructions depend on, not step by step: messages have their own thread.

The thread runs the message instructions in their order, the calling thread all others in theirs; each waits
for those of the other that it depends on (lowering/streams.py). So the next step's messages travel while
this step is still computed, as far as buffers have room. The order of computations is that of the list, so
the results are the same to the bit.

For CPUs. On a GPU a second stream would do the same; that is not built.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from ..lowering.streams import NEVER, streams_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..lowering.program import Instruction
    from .execute import Executor


class _Progress:
    """How far the two streams are, and the first error of either."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ended = [NEVER, NEVER]  # the last instruction of each stream that has ended
        self.error: BaseException | None = None

    def wait_for(self, stream: int, index: int) -> bool:
        """Wait until a stream has ended this instruction; False where one of them has failed."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended[stream] >= index or self.error is not None)
            return self.error is None

    def end(self, stream: int, index: int) -> None:
        """A stream has ended this instruction."""
        with self.changed:
            self.ended[stream] = index
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """A stream has failed: the other one stops."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()


def run(executor: Executor, perform: Callable[[Instruction], None]) -> None:
    """Run all instructions of the executor's program; `perform` runs one.

    Raises:
        what either stream raises first.
    """
    program, progress = executor.program, _Progress()
    streams = streams_of(program)
    inference = torch.is_inference_mode_enabled()

    def follow(number: int, stream: Sequence[int]) -> None:
        try:
            for index in stream:
                if not progress.wait_for(1 - number, streams.after[index]):
                    return
                perform(program.instructions[index])
                if number:  # an emulated device has ended when its time is over
                    executor.ctx.kernel.finish()
                progress.end(number, index)
        except BaseException as error:
            progress.fail(error)

    def messages() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            follow(0, streams.messages)

    thread = threading.Thread(target=messages, name="messages of attention", daemon=True)
    thread.start()
    follow(1, streams.computations)
    if (
        progress.error is None
    ):  # else a thread that waits for a message ends at the group's time-out
        thread.join()
    if progress.error is not None:
        raise progress.error
