"""Plan files: the few values that, with its documents, rebuild a plan, written and read back as JSON.

The same values are what a plan's fingerprint is made of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import PlanError
from ..machines.machine import Machine
from ..schedules import SCHEDULES, Schedule, Table, build
from ..schedules.schedule import read_limits
from ..sequence.documents import Documents
from ..sequence.layouts import Layout
from ..sequence.masks import Mask

if TYPE_CHECKING:
    from .plan import Plan


def spec(plan: Plan) -> dict[str, Any]:
    """Groups, layout and schedule of a plan as plain values; "ranks" counts groups of `intra` ranks."""
    schedule = plan.schedule
    data: dict[str, Any] = {
        "ranks": plan.layout.ranks,
        "intra": plan.intra,
        "layout": plan.layout.name,
        "schedule": schedule.name,
        "node_size": schedule.node_size,
        "options": schedule.options,
    }
    if isinstance(schedule, Table):
        data |= {"hops": list(schedule.lines), "num_shares": schedule.shares}
        data["limits"] = list(schedule.claim)
        if schedule.like is not None:
            data["like"] = {"schedule": schedule.like.name, "options": schedule.like.options}
    return data


def mask_slices(docs: Documents) -> dict[str, Any]:
    """The key "slices" of documents that have a mask of their own, else none."""
    return {} if docs.slices is None else {"slices": [x.as_list() for x in docs.slices.slices]}


PLAN_KEYS = (
    "schema",
    "documents",
    "ranks",
    "intra",
    "layout",
    "schedule",
    "node_size",
    "options",
    "machine",
)
TABLE_KEYS = ("hops", "num_shares", "limits")
MOST_RANKS = 1 << 20


def read_json(text: str, schema: int) -> dict[str, Any]:
    """The object of a plan file, its keys and the types of plain values checked.

    Raises:
        PlanError: names the field, what was found and what is right.
    """

    def constant(name: str) -> None:
        raise PlanError(f"not a plan: {name} is no number of JSON")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for i, (key, _) in enumerate(items) if key in dict(items[:i])]
        if twice:
            raise PlanError(f"not a plan: the key {twice[0]!r:.80} is there twice")
        return dict(items)

    try:
        data = json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
        json.dumps(data, ensure_ascii=False).encode()
    except PlanError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise PlanError(f"not a plan: it cannot be read as JSON: {error!s:.200}") from None
    if not isinstance(data, dict):
        raise PlanError(f"not a plan: it must be a JSON object, got {data!r:.80}")
    if type(number := data.get("schema")) is not int or number != schema:
        raise PlanError(f"plan has schema {number!r:.80}, this version reads {schema}")
    if data.get("schedule") == Table.name:
        if "promise" in data and "limits" not in data:  # files written before version 0.2
            data["limits"] = data.pop("promise")
        _keys(data, "", (*PLAN_KEYS, *TABLE_KEYS), ("like", "world_size"))
    else:
        _keys(data, "", PLAN_KEYS, ("world_size",))
    for key in ("ranks", "intra", "node_size", "world_size", "num_shares"):
        if key in data:
            _int(data, "", key, 1)
    _int(data, "", "ranks", 1, MOST_RANKS)
    _int(data, "", "intra", 1, MOST_RANKS // data["ranks"])
    world_size = data["ranks"] * data["intra"]
    if data.get("world_size", world_size) != world_size:
        raise PlanError(
            f"not a plan: world_size must be ranks x intra, {data['ranks']} x {data['intra']}, "
            f"got {data['world_size']}"
        )
    for key in ("layout", "schedule"):
        _type(data, "", key, str, "a name")
    return data


def read_documents(data: dict[str, Any]) -> Documents:
    """The documents of a plan file.

    Raises:
        PlanError: names the field.
    """
    values = _keys(data["documents"], "documents", ("cu_seqlens", "causal", "window"), ("slices",))
    _type(values, "documents.", "causal", bool, "true or false")
    if values["window"] is not None:
        _int(values, "documents.", "window", 1)
    _type(values, "documents.", "cu_seqlens", list, "a list of whole numbers")
    wrong = [x for x in values["cu_seqlens"] if type(x) is not int or not 0 <= x < 1 << 62]
    if wrong:
        raise PlanError(
            f"not a plan: documents.cu_seqlens must be whole numbers >= 0, got {wrong[0]!r:.80}"
        )
    if "slices" not in values:
        return _made("documents", lambda: Documents(**values))
    _type(values, "documents.", "slices", list, "a list of slices")
    for i, values_of_slice in enumerate(values["slices"]):
        if not isinstance(values_of_slice, list) or not all(
            type(x) in (int, str) for x in values_of_slice
        ):
            raise PlanError(
                f"not a plan: documents.slices[{i}] must be a list of whole numbers and a kind, "
                f"got {values_of_slice!r:.80}"
            )
    total = values["cu_seqlens"][-1] if values["cu_seqlens"] else 0
    mask = _made("documents.slices", lambda: Mask.of(values["slices"], total))
    return _made("documents", lambda: Documents(**{**values, "slices": mask}))


def read_machine(data: dict[str, Any]) -> Machine:
    """The machine of a plan file, of as many ranks as the plan has.

    Raises:
        PlanError: names the field.
    """
    known = {f.name: f for f in fields(Machine)}
    needed = [f.name for f in fields(Machine) if f.default is MISSING]
    values = _keys(data["machine"], "machine", needed, known)
    for key, value in values.items():
        if known[key].type == "str":
            _type(values, "machine.", key, str, "text")
        elif known[key].type == "int":
            _int(values, "machine.", key, 0)
        elif _has_bool(value):
            raise PlanError(
                f"not a plan: machine.{key} must have no true or false, got {value!r:.80}"
            )
    ranks = values["node_size"] * values.get("num_nodes", 1)
    if ranks != data["ranks"]:
        raise PlanError(
            f"not a plan: machine.node_size x machine.num_nodes must be ranks, {data['ranks']}, "
            f"got {ranks}"
        )
    return _made("machine", lambda: Machine(**values))


def read_layout(data: dict[str, Any], docs: Documents) -> Layout:
    """The layout of a plan file.

    Raises:
        PlanError: names the field.
    """
    return _made("layout", lambda: Layout(data["layout"], docs, data["ranks"]))


def read_schedule(data: dict[str, Any], machine: Machine, layout: Layout) -> Schedule:
    """The schedule of a plan file.

    Raises:
        PlanError: values that contradict each other or the machine; names the field.
    """
    if data["schedule"] != Table.name:
        schedule = _built(data, "", machine, layout)
        if schedule.node_size != data["node_size"]:
            raise PlanError(
                f"not a plan: node_size must be that of the machine, {schedule.node_size}, "
                f"got {data['node_size']}"
            )
        return schedule
    options = _keys(data["options"], "options", (), ("exchange",))
    if data["node_size"] != machine.node_size:
        raise PlanError(
            f"not a plan: node_size must be that of the machine, {machine.node_size}, "
            f"got {data['node_size']}"
        )
    _type(data, "", "hops", list, "a list of words such as 't3 2>5 kv1.4'")
    _type(data, "", "limits", list, "a list of numbers")
    like = None
    if data.get("like") is not None:
        _keys(data["like"], "like", ("schedule", "options"))
        _type(data["like"], "like.", "schedule", str, "a name")
        like = _built(data["like"], "like.", machine, layout)
    return _made(
        "table",
        lambda: Table(
            machine.ranks,
            machine.node_size,
            options.get("exchange", "p2p"),
            tuple(data["hops"]),
            data["num_shares"],
            read_limits(data["limits"]),
            like,
        ),
    )


def _built(data: dict[str, Any], where: str, machine: Machine, layout: Layout) -> Schedule:
    """A named schedule from its name and options."""
    name, options = data["schedule"], data["options"]
    if name not in SCHEDULES:
        known = ", ".join((*SCHEDULES, Table.name))
        raise PlanError(f"not a plan: {where}schedule must be one of {known}, got {name!r:.80}")
    if not isinstance(options, dict):
        raise PlanError(f"not a plan: {where}options must be an object, got {options!r:.80}")
    kinds = {option.name: option.type for option in SCHEDULES[name].options_taken()}
    for key, value in options.items():
        kind, actual = kinds.get(key), type(value).__name__
        if kind is not None and actual != kind and (kind, actual) != ("float", "int"):
            raise PlanError(f"not a plan: {where}options.{key} must be {kind}, got {value!r:.80}")
    return _made(f"{where}options", lambda: build(name, machine, options, layout))


Made = TypeVar("Made")


def _made(field: str, make: Callable[[], Made]) -> Made:
    """What `make` returns; whatever its values make it raise names the field."""
    try:
        return make()
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__} "
        raise PlanError(f"not a plan: {field}: {kind}{error}") from None


def _keys(
    data: Any, where: str, needed: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, Any]:
    """`data`, if it is an object with these keys."""
    if not isinstance(data, dict):
        raise PlanError(f"not a plan: {where} must be an object, got {data!r:.80}")
    known = {*needed, *optional}
    dot = f"{where}." if where else ""
    for key in needed:
        if key not in data:
            raise PlanError(f"not a plan: it has no key '{dot}{key}'")
    unknown = sorted(set(data) - known)
    if unknown:
        raise PlanError(
            f"not a plan: it has a key {dot + unknown[0]!r:.80} that no plan has; known are {sorted(known)}"
        )
    return data


def _int(data: dict[str, Any], where: str, key: str, least: int, most: int | None = None) -> None:
    value = data[key]
    if type(value) is not int or value < least or (most is not None and value > most):
        upto = "" if most is None else f" and <= {most}"
        raise PlanError(
            f"not a plan: {where}{key} must be a whole number >= {least}{upto}, got {value!r:.80}"
        )


def _type(data: dict[str, Any], where: str, key: str, kind: type, right: str) -> None:
    if not isinstance(data[key], kind):
        raise PlanError(f"not a plan: {where}{key} must be {right}, got {data[key]!r:.80}")


def _has_bool(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(map(_has_bool, value if isinstance(value, list) else value.values()))
    return isinstance(value, bool)
