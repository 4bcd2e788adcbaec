"""The documentation is complete and true: names, commands, floors, files, terms; the site stands alone."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tasp_core as tasp
from tasp_core.cli.app import app
from tasp_core.schedules import SCHEDULES

ROOT = Path(__file__).parent.parent
DOCS, SITE = ROOT / "docs", ROOT / "site"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
REFERENCES = re.findall(r"^::: (\S+)$", PAGES["reference.md"], flags=re.MULTILINE)
FUNCTIONS = [name for name in tasp.__all__ if inspect.isfunction(getattr(tasp, name))]

sys.path.insert(0, str(DOCS))
site_hooks = importlib.import_module("site_hooks")
sys.path.remove(str(DOCS))


def section(page: str, title: str) -> str:
    """The text below a heading of level 2, up to the next one."""
    return PAGES[page].split(f"\n## {title}\n")[1].split("\n## ")[0]


# --- the API reference --------------------------------------------------------------------------


def test_the_reference_has_every_public_name_once():
    assert sorted(x.rpartition(".")[2] for x in REFERENCES) == sorted(tasp.__all__)


@pytest.mark.parametrize("path", REFERENCES)
def test_each_reference_is_the_public_object(path):
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is getattr(tasp, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_public_function_has_an_example(name):
    text = inspect.getdoc(getattr(tasp, name)) or ""
    assert ">>> " in text, f"{name}: no example"  # run with the tests: --doctest-modules
    arguments = inspect.signature(getattr(tasp, name)).parameters
    assert len(text.splitlines()) > 2 or not arguments


# --- the command line ---------------------------------------------------------------------------

EXAMPLES = [x.strip() for x in re.findall(r"^    (.*tasp_core .*)$", PAGES["cli.md"], re.MULTILINE)]
QUICK = ("rings", "plan", "check", "simulate", "select")  # no ranks are started


def words_of(example: str) -> list[str]:
    return shlex.split(example.partition("tasp_core ")[2])


def test_every_command_has_its_section_example_and_options():
    commands = site_hooks.commands()
    assert {"plan", "check", "run", "bench attention", "fabric up"} <= set(commands)
    assert re.findall(r"^### `(.*)`$", PAGES["cli.md"], re.MULTILINE) == site_hooks.MARK.findall(
        PAGES["cli.md"]
    )
    assert sorted(site_hooks.MARK.findall(PAGES["cli.md"])) == sorted(commands)
    for name in commands:
        assert any(" ".join(words_of(x)).startswith(name) for x in EXAMPLES), name


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_example_is_understood(example):
    words = words_of(example)
    if words[0] in QUICK:
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, done.exception) == (0, None)
        assert done.output.strip()
        return
    name = next(n for n in site_hooks.commands() if " ".join(words).startswith(n))
    site_hooks.commands()[name].make_context(name, words[len(name.split()) :])  # parsed, not run


@pytest.mark.parametrize("name", ["plan", "bench attention", "fabric run"])
def test_option_tables_have_every_option(name):
    table = site_hooks.options_table(name)
    for parameter in site_hooks.commands()[name].params:
        assert parameter.opts[0].lstrip("-") in table.lower()
    assert all(line.count("|") == 4 for line in table.splitlines() if line.startswith("|"))


# --- architecture -------------------------------------------------------------------------------


def test_the_floors_are_the_contract():
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section("architecture.md", "Floors"), re.M)
    page = [row.replace("`", "").replace(", ", " | ") for row in rows]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (floors,) = [x for x in contracts["contracts"] if x.get("containers") == ["tasp_core"]]
    assert page == floors["layers"]


def test_every_file_has_a_line():
    listed = re.findall(r"^\| `(\S+\.py)` \| \S", section("architecture.md", "Files"), re.M)
    package = ROOT / "tasp_core"
    files = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    # a new schedule is one file and no line: `python -m tasp_core plan --help` and schedules() list it
    schedules = {f"schedules/{Path(inspect.getfile(cls)).name}" for cls in SCHEDULES.values()}
    assert files - set(listed) - schedules == set(), "files without a line"
    assert set(listed) - files == set(), "lines without a file"
    assert len(listed) == len(set(listed))


def test_the_walk_names_files_in_order_each_once():
    text = section("architecture.md", "The walk of one KV chunk")
    steps = re.findall(r"^(\d+)\. `(\S+\.py)`:", text, re.MULTILINE)
    assert [int(number) for number, _ in steps] == [*range(1, len(steps) + 1)]
    files = [name for _, name in steps]
    assert (files[0], files[-1]) == ("planner.py", "runtime/merge.py")
    assert len(files) == len(set(files))
    arrivals = [x for x in tasp.plan([4096], ranks=8).hops().lines() if x.endswith(">5 kv1.4")]
    assert [f"`{hop}`" in text for hop in arrivals] == [True]
    assert "in compute step 4" in text


@pytest.mark.parametrize("page", ["architecture.md", "moved.md"])
def test_paths_exist(page):
    text = PAGES[page]
    if page == "moved.md":  # the first column is what was
        text = "\n".join(re.findall(r"^\| .* \| (.*) \|$", text, re.MULTILINE)[2:])
    roots = ("cli", "lab", "integrations", "runtime", "kernels", "costs", "lowering", "planning")
    roots += ("schedules", "sequence", "machines")
    missing = [
        path
        for path in re.findall(rf"`((?:{'|'.join(roots)})/[\w/]*(?:\.py)?)`", text)
        if not (ROOT / "tasp_core" / path).exists()
    ]
    assert missing == []


def test_moved_modules_are_gone():
    rows = re.findall(r"^\| (`.*) \| .* \|$", PAGES["moved.md"], re.MULTILINE)
    old = [path for row in rows for path in re.findall(r"`(\S+\.py)`", row)]
    assert len(old) > 70
    assert [path for path in old if (ROOT / "tasp_core" / path).exists()] == []


# --- glossary -----------------------------------------------------------------------------------

TERMS = re.findall(r"^- \*\*(.+?)\*\*(.*)$", PAGES["glossary.md"], re.MULTILINE)


def test_the_glossary_is_sorted_and_defines_each_term_once():
    assert len(TERMS) == PAGES["glossary.md"].count("\n- ")
    names = [name.lower() for name, _ in TERMS]
    assert names == sorted(names)
    singles = [single for name in names for single in name.split(", ")]
    assert len(singles) == len(set(singles))
    for name, rest in TERMS:
        assert re.match(r"( \(.+?\))?: \S.{15,}\.$", rest), name


@pytest.mark.parametrize(
    "term",
    [
        "share",
        "sub-chunk",
        "hop",
        "step",
        "rank",
        "document",
        "layout",
        "schedule",
        "plan",
        "lse",
        "port",
        "NIC",
        "CCR",
        "link",
        "packed sequence",
        "declared limits",
        "offloaded attention pairs",
        "remote query",
        "partial output",
        "KV receive buffer",
        "gradient receive buffer",
        "Ulysses degree",
        "context-parallel plan",
        "node peers",
        "cut bound",
        "signature",
        "handshake",
    ],
)
def test_the_glossary_has(term):
    assert term in [single for name, _ in TERMS for single in name.split(", ")]


# --- links, and the built site ------------------------------------------------------------------

TEXTS = {DOCS / name: text for name, text in PAGES.items()}
TEXTS |= {path: path.read_text() for path in (ROOT / "README.md", ROOT / "CHANGELOG.md")}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)]+)\)", TEXTS[path]):
        assert not target.startswith("http")
        # the site's builder adds recorded figures to the pages (docs/site_hooks.py)
        root = ROOT / "visualize" if target.startswith("recorded/") else path.parent
        assert (root / target.partition("#")[0]).exists(), target


def resources(html: str) -> list[str]:
    """What a browser fetches for a page by itself: scripts, styles, pictures, fonts."""
    tags = re.findall(r"<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=\"?([^\" >]+)", html)
    for tag in re.findall(r"<link\b[^>]*>", html):
        if re.search(r'rel="?(stylesheet|icon|preload|preconnect|modulepreload)', tag):
            tags += re.findall(r"href=\"?([^\" >]+)", tag)
    return tags + re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", html)


def test_resources_of_a_page_are_seen():
    page = (
        '<link href="https://a/b.css" rel="stylesheet"><script src=//c/d.js></script>'
        "<style>@font-face{src:url('https://e/f.woff')}</style><a href='https://g'>g</a>"
    )
    assert resources(page) == ["//c/d.js", "https://a/b.css", "https://e/f.woff"]


@pytest.mark.docs
def test_the_site_loads_nothing_from_the_network():
    pages = [*SITE.rglob("*.html"), *SITE.rglob("*.css")]
    assert len(pages) > 8
    for path in pages:
        for address in resources(path.read_text()):
            address = address.partition("?")[0].partition("#")[0]
            if address.startswith("data:") or not address:
                continue
            assert not re.match(r"(https?:)?//", address), (path, address)
            local = SITE / address.lstrip("/") if address[0] == "/" else path.parent / address
            assert local.exists(), (path, address)


@pytest.mark.docs
def test_the_site_has_every_name_and_finds_it():
    html = (SITE / "reference.html").read_text()
    found = {
        x["location"] for x in json.loads((SITE / "search/search_index.json").read_text())["docs"]
    }
    for path in REFERENCES:
        assert f'id="{path}"' in html, path
        assert f"reference.html#{path}" in found, path
    for method in ("Plan.fingerprint", "Plan.from_json", "Documents.of", "Machine.degraded"):
        assert f'id="tasp_core.{method}"' in html, method
    assert "&gt;&gt;&gt;" in html
    assert "<blockquote>" not in html  # doctest lines that Markdown has read as quotations
    cli = (SITE / "cli.html").read_text()
    assert "options of" not in cli
    assert cli.count("<table>") == len(site_hooks.commands())
