"""Options of the command line: written once, and the same in every command that plans."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args

import pytest
import typer
from typer.testing import CliRunner

import tasp_core as tasp
from tasp_core.cli.app import app
from tasp_core.cli.options import DocumentOptions, PlanOptions, TensorOptions, command


@dataclass(frozen=True)
class Group:
    """Options of a command that only this test has."""

    out: Annotated[str, "Required."]
    data: Annotated[tuple[str, ...], "Several."] = ()
    two_words: Annotated[bool, "A switch."] = False
    mode: Annotated[Literal["a", "b"], "Text."] = "a"


def options_of(name):
    """Each option's type, flag, help and default, by parameter."""
    callbacks = {c.callback.__name__: c.callback for c in app.registered_commands}
    options = {}
    for parameter in inspect.signature(callbacks[name]).parameters.values():
        kind, option = get_args(parameter.annotation)
        options[parameter.name] = kind, option.default, option.help, parameter.default
    return options


@pytest.mark.parametrize(
    ("name", "groups", "different"),
    [
        ("plan", (PlanOptions, TensorOptions), {}),
        ("check", (PlanOptions,), {}),
        ("simulate", (PlanOptions, TensorOptions), {}),
        ("select", (DocumentOptions, TensorOptions), {}),
        ("run", (PlanOptions, TensorOptions), {"docs": "137,2041,89", "dtype": "float32"}),
    ],
)
def test_commands_that_plan_take_the_same_options(name, groups, different):
    reference, options = options_of("plan"), options_of(name)
    for field in (f for group in groups for f in fields(group)):
        _, flag, text, default = options[field.name]
        assert flag == "--" + field.name.replace("_", "-")
        assert text
        assert options[field.name][:3] == reference[field.name][:3]
        assert default == different.get(field.name, field.default)


def test_a_window_changes_what_is_selected_as_it_does_in_a_plan():
    words = ["select", "--docs", "4096", "--machine", "mesh4", "--window", "64", "--json"]
    done = CliRunner().invoke(app, words)
    docs = tasp.Documents.of([4096], window=64)
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
    choice = tasp.select(docs, tasp.machine("mesh4"), backward=False, **sizes)
    assert json.loads(done.output) == json.loads(json.dumps(choice.as_dict()))
    wide = CliRunner().invoke(app, [*words[:-3], "--json"])
    assert json.loads(wide.output) != json.loads(done.output)


def test_a_command_gets_groups_lists_and_literals():
    seen, cli, run = [], typer.Typer(), CliRunner().invoke

    @command(cli, mode="b")
    def receive(group: Group, json_: Annotated[bool, "Json."] = False) -> None:
        seen.append((group, json_))

    assert run(cli, ["--out", "x", "--data", "1", "--data", "2", "--two-words"]).exit_code == 0
    assert run(cli, ["--out", "x", "--json", "--mode", "a"]).exit_code == 0
    assert seen == [(Group("x", ("1", "2"), True, "b"), False), (Group("x"), True)]
    assert run(cli, []).exit_code == 2  # --out has no default
    assert run(cli, ["--out", "x", "--no-two-words"]).exit_code == 2
