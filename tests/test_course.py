"""Every notebook of the course runs from top to bottom, without network: `make test-course`."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("jupytext", reason="the course needs the notebooks' packages: make notebooks")
import nbformat

from tasp_course.build import notebook
from tasp_course.export import execute
from tasp_course.sources import HERE, KINDS, tags, units

pytestmark = pytest.mark.course
LONGEST_S, MOST_BYTES = 60, 2 * 10**9

# Audit hooks see every connection and every look-up of a host name, in forked ranks, too.
OFFLINE = """
import sys as _sys

def _only_here(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        address = args[0] if event == "socket.getaddrinfo" else args[1]
        host = address[0] if isinstance(address, tuple) else address
        if isinstance(address, tuple) or event == "socket.getaddrinfo":
            if host not in ("127.0.0.1", "localhost", "::1", "", None):
                raise ConnectionRefusedError(f"no network here: {host}")

_sys.addaudithook(_only_here)
"""


class PeakMemory(threading.Thread):
    """The peak memory (PSS) of all child processes of this one together, while the thread runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.running = 0, True

    def run(self) -> None:
        while self.running:
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:  # it has just ended
                    continue
            self.peak = max(self.peak, total)
            time.sleep(0.3)


def offline(nb: Any) -> Any:
    """The notebook with a first cell that refuses all but the loopback network."""
    nb.cells.insert(0, nbformat.v4.new_code_cell(OFFLINE))
    return nb


def errors(nb: Any) -> list[str]:
    outputs = (o for c in nb.cells if c.cell_type == "code" for o in c.outputs)
    return [f"{o.ename}: {o.evalue}" for o in outputs if o.output_type == "error"]


def verdicts(nb: Any) -> Counter[str]:
    outputs = (o.get("data") for c in nb.cells if "check" in tags(c) for o in c.outputs)
    texts = [data["text/plain"] for data in outputs if data]
    return Counter(re.match(r"still to do|not yet|right", text)[0] for text in texts)


def uncomputed_numbers(nb: Any) -> list[str]:
    """Numbers in prose that are in no code and no output. Recap questions may have their own numbers."""
    computed, prose = "", ""
    for cell in nb.cells:
        if cell.cell_type == "markdown":
            recap = cell.source.startswith("## Recap")  # its numbers belong to the questions
            prose += "" if recap else f"\n{cell.source}"
            continue
        computed += f"\n{cell.source}"
        for out in cell.outputs:
            computed += f"\n{out.get('text', '')}{out.get('data', {}).get('text/plain', '')}"
    prose = re.sub(r"^#+ .*$|`[^`]*`|\[\d+|\]\([^)]*\)|^\d+\. ", "", prose, flags=re.MULTILINE)
    prose = re.sub(r"\bunits? \d+( to \d+)?|arXiv \S+", "", prose)
    known = set(re.findall(r"\d+(?:\.\d+)?", computed.replace(",", "")))
    return [
        x
        for x in re.findall(r"(?<![a-zA-Z\d.])\d+(?:\.\d+)?", prose.replace(",", ""))
        if x not in known
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", units(), ids=lambda p: p.stem[:7])
def test_a_unit_runs(source, kind):
    memory, start = PeakMemory(), time.monotonic()
    memory.start()
    executed = execute(offline(notebook(source, kind)), HERE / kind)
    seconds, memory.running = time.monotonic() - start, False
    memory.join()
    print(f"\n{source.stem[:7]} {kind}: {seconds:.1f} s, {memory.peak / 1e6:.0f} MB")
    assert not errors(executed)
    counts = verdicts(executed)
    assert set(counts) == {"still to do" if kind == "learner" else "right"}, counts
    assert counts.total() >= 4
    if kind == "solved":
        assert not uncomputed_numbers(executed)
    assert seconds <= LONGEST_S
    assert memory.peak <= MOST_BYTES


def test_the_index_runs():
    assert not errors(execute(offline(notebook(HERE / "src" / "index.py", "learner")), HERE))


def test_a_learners_error_does_not_end_the_run():
    nb = notebook(units(["0"])[0], "learner")
    stub = next(c for c in nb.cells if "exercise" in tags(c) and c.cell_type == "code")
    stub.source = "1 / 0"
    executed = execute(offline(nb), HERE / "learner")
    assert [e.split(":")[0] for e in errors(executed)] == ["ZeroDivisionError", "NameError"]
    assert verdicts(executed)["still to do"] >= 3
    assert all(c.execution_count for c in executed.cells if c.cell_type == "code")


@pytest.mark.parametrize(
    "line", ["s.connect(('192.0.2.1', 80))", "socket.getaddrinfo('example.org', 80)"]
)
def test_the_network_is_shut(line, tmp_path: Path):
    cell = nbformat.v4.new_code_cell(
        f"import socket\ns = socket.socket()\n{line}", metadata={"tags": ["raises-exception"]}
    )
    executed = execute(offline(nbformat.v4.new_notebook(cells=[cell])), tmp_path)
    assert errors(executed)[0].startswith("ConnectionRefusedError: no network here")
