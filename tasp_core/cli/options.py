"""Options of the commands: each is written once, with its type, its help text and its default.

    @command(app, docs="137,2041")
    def run(plan_options: PlanOptions, kernel: Annotated[str, "Help text."] = "auto"): ...

adds the command `run` with every option of `PlanOptions`, another default for --docs, and --kernel. A
dataclass is a group of options, which its methods turn into what they describe.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from rich.console import Console

from ..errors import PlanError
from ..machines.presets import PRESETS
from ..planner import plan as make_plan
from ..planning.plan import Plan
from ..schedules import schedules
from ..sequence.documents import Documents
from ..sequence.layouts import layouts

console = Console(highlight=False, soft_wrap=True)

MACHINE = f"{', '.join(PRESETS)}, meshN, each with xU for U nodes, or a file."
Json = Annotated[bool, "Print JSON and nothing else."]
Ranks = Annotated[int, "Degree of sequence parallelism."]
Full = Annotated[bool, "Full mask instead of causal."]
KernelName = Annotated[str, "auto, math, aten or flash."]


@dataclass(frozen=True)
class DocumentOptions:
    """The documents of a packed sequence and their mask."""

    docs: Annotated[str, "Document lengths in tokens, e.g. 137,2041,89 or 512x8."] = "4096"
    full: Full = False
    window: Annotated[int | None, "Sliding window in tokens; it counts a token itself."] = None

    def documents(self) -> Documents:
        """The documents that these options describe."""
        return Documents.of(read_lengths(self.docs), causal=not self.full, window=self.window)


@dataclass(frozen=True)
class PlanOptions(DocumentOptions):
    """All that `tasp_core.plan` takes."""

    ranks: Ranks = 4
    schedule: Annotated[str, ", ".join(schedules())] = "tasp"
    layout: Annotated[str, ", ".join(layouts())] = "zigzag"
    machine: Annotated[str | None, MACHINE] = None
    options: Annotated[str, "Schedule options, e.g. blocks=15,twins=14."] = ""
    intra: Annotated[int, "Ulysses degree: ranks of a group that divides the heads."] = 1

    def plan(self) -> Plan:
        """The plan that these options describe."""
        return make_plan(
            self.documents(),
            self.ranks,
            schedule=self.schedule,
            layout=self.layout,
            machine=self.machine,
            intra=self.intra,
            schedule_options=_schedule_options(self.options),
        )


@dataclass(frozen=True)
class TensorOptions:
    """Shapes and type of q, k and v."""

    heads: Annotated[int, "Query heads."] = 8
    kv_heads: Annotated[int, "Key/value heads."] = 2
    head_dim: Annotated[int, "Head dim of q, k and v."] = 64
    dtype: Annotated[str, "Of q, k and v: float32, bfloat16, float16 or float64."] = "bfloat16"


def read_lengths(text: str) -> list[int]:
    """Document lengths from "137,2041,89" or "512x8" (eight of 512).

    >>> read_lengths("3,2x2")
    [3, 2, 2]
    """
    result: list[int] = []
    for item in filter(None, text.replace(" ", "").split(",")):
        size, _, times = item.partition("x")
        if not (size.isdigit() and (times.isdigit() or "x" not in item)):
            raise PlanError(f"cannot read document length {item!r}; write 137 or 512x8")
        result += [int(size)] * int(times or 1)
    return result


def _schedule_options(text: str) -> dict[str, Any]:
    """Values by name: numbers, true and false, and else text.

    >>> _schedule_options("blocks=15, exchange=p2p")
    {'blocks': 15, 'exchange': 'p2p'}
    """
    pairs = (item.partition("=") for item in filter(None, text.replace(" ", "").split(",")))
    booleans = {"true": True, "false": False}
    return {
        key: int(value) if value.isdigit() else booleans.get(value.lower(), value)
        for key, _, value in pairs
    }


def command(
    app: typer.Typer,
    name: str | None = None,
    *,
    context_settings: dict[str, Any] | None = None,
    **defaults: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the decorated function to `app` as a command.

    A parameter whose type is a dataclass becomes one option for each of its fields. A parameter or field
    `Annotated[type, "help"]` becomes an option that is named like it. Other parameters stay as they are.

    Args:
        defaults: by field, those of this command where they differ from the dataclass's.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        app.command(name, context_settings=context_settings)(_expanded(function, defaults))
        return function

    return add


def _expanded(function: Callable[..., None], defaults: dict[str, Any]) -> Callable[..., None]:
    """The function as typer takes it."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    types = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        if not is_dataclass(types[name]):
            parameters.append(_option(name, types[name], parameter.default))
            continue
        group = groups[name] = types[name]
        field_types = get_type_hints(group, include_extras=True)
        for field in fields(group):
            default = parameter.empty if field.default is MISSING else field.default
            default = defaults.get(field.name, default)
            parameters.append(_option(field.name, field_types[field.name], default))

    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            members = {field.name: values.pop(field.name) for field in fields(group)}
            values[name] = group(
                **{k: tuple(v) if isinstance(v, list) else v for k, v in members.items()}
            )
        function(**values)

    expanded.__name__, expanded.__doc__ = function.__name__, function.__doc__
    expanded.__annotations__ = {p.name: p.annotation for p in parameters}
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return expanded


def _option(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """A parameter that typer reads; it takes a tuple as a list, and a literal as text."""
    if get_origin(hint) is Annotated and isinstance(hint.__metadata__[0], str):
        kind, text = hint.__origin__, hint.__metadata__[0]
        if get_origin(kind) is tuple:
            kind, default = list[get_args(kind)[0]], [*default]  # type: ignore[misc]
        elif get_origin(kind) is Literal:
            kind = str
        flag = "--" + name.rstrip("_").replace("_", "-")
        hint = Annotated[kind, typer.Option(flag, help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)


def show_json(data: dict[str, Any]) -> None:
    """One line of JSON."""
    sys.stdout.write(json.dumps(data) + "\n")
