"""A JupyterLab server and a real browser, for tests of notebooks.

    with Lab(root) as lab, lab.page("scratch.ipynb") as page:
        run_all(page);  move_slider(page, 0);  shoot(page, "scratch")

The server runs on a free port of this machine with a token, and has its settings in a temporary folder. The
browser is Debian's Chromium (apt-get install chromium), with a fresh profile; nothing is downloaded.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "build" / "screenshots"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTH, HEIGHT = 1400, 1000


def chromium() -> str:
    """The path of the browser.

    Raises:
        FileNotFoundError: no browser is installed; the text says how to install one.
    """
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if not path:
        raise FileNotFoundError("no chromium on the path; on Debian: apt-get install chromium")
    return path


def free_port() -> int:
    """A port on which no server listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Lab:
    """A JupyterLab server for the notebooks in `root`; as a context manager it stops at the end."""

    def __init__(self, root: Path, *, start_s: float = 90) -> None:
        self.root, self.start_s = root, start_s
        self.token, self.port = secrets.token_hex(16), free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Lab:
        self._folder = tempfile.TemporaryDirectory(prefix="lab-")
        folder = Path(self._folder.name)
        variables = (
            "JUPYTER_CONFIG_DIR",
            "JUPYTER_DATA_DIR",
            "JUPYTER_RUNTIME_DIR",
            "IPYTHONDIR",
            "HOME",
        )
        env = {name: str(folder / name) for name in variables}
        extension = folder / "JUPYTER_CONFIG_DIR/lab/user-settings/@jupyterlab/apputils-extension"
        extension.mkdir(parents=True)  # no dialog about news above the page, no check for updates
        settings = '{"fetchNews": "false", "checkForUpdates": false}'
        (extension / "notification.jupyterlab-settings").write_text(settings)
        env |= {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": f"{ROOT}:{ROOT}/notebooks",
        }
        command = [
            sys.executable,
            "-m",
            "jupyterlab",
            "--no-browser",
            "--allow-root",
            "--expose-app-in-browser",
            "--ip=127.0.0.1",
            f"--port={self.port}",
            "--ServerApp.port_retries=0",
            f"--IdentityProvider.token={self.token}",
            f"--ServerApp.root_dir={self.root}",
        ]
        self.log = (folder / "log").open("w+")
        self.server = subprocess.Popen(command, env=env, stdout=self.log, stderr=self.log)
        end = time.monotonic() + self.start_s
        while not self._answers():
            if self.server.poll() is not None or time.monotonic() > end:
                output = Path(self.log.name).read_text()[-2000:]
                self.__exit__()
                raise RuntimeError(
                    f"JupyterLab did not answer within {self.start_s} s; its output was:\n{output}"
                )
            time.sleep(0.3)
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/api?token={self.token}", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def __exit__(self, *unused: Any) -> None:
        self.server.terminate()
        try:
            self.server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        self.log.close()
        self._folder.cleanup()

    @contextmanager
    def page(self, notebook: str) -> Iterator[Any]:
        """The notebook (a path below root), open in a fresh browser, with its kernel started."""
        with browser_page() as page:
            page.goto(f"{self.url}/doc/tree/{notebook}?token={self.token}&reset")
            page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
            page.evaluate(
                "async () => { await jupyterapp.shell.currentWidget.sessionContext.ready; }"
            )
            yield page


@contextmanager
def browser_page() -> Iterator[Any]:
    """An empty page of a fresh browser. For an exported file: `page.goto(path.as_uri())`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        try:
            yield browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        finally:
            browser.close()


def run_all(page: Any, *, limit_s: float = 120) -> None:
    """Run all cells and wait until the last one is done."""
    page.evaluate(
        "() => { window.allRan = false;"
        " jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.allRan = true; }); }"
    )
    page.wait_for_function("window.allRan", timeout=1000 * limit_s)


def cells(page: Any) -> list[dict[str, Any]]:
    """The cells of the notebook with their outputs, also those that are not on the screen."""
    return list(page.evaluate("jupyterapp.shell.currentWidget.content.model.toJSON().cells"))


def errors(page: Any) -> list[str]:
    """The errors among the outputs."""
    outputs = (o for c in cells(page) for o in c.get("outputs", ()))
    return [f"{o['ename']}: {o['evalue']}" for o in outputs if o["output_type"] == "error"]


def show(page: Any, text: str) -> None:
    """Scroll to the first cell whose source contains this text."""
    number = next(i for i, c in enumerate(cells(page)) if text in "".join(c["source"]))
    page.evaluate("i => jupyterapp.shell.currentWidget.content.scrollToItem(i, 'start')", number)
    page.wait_for_timeout(500)


def figure(page: Any, number: int = 0) -> str:
    """The HTML of the figure of the page's widget with this number."""
    return page.locator(".widget-html-content").nth(number).inner_html()


def move_slider(page: Any, number: int, *, key: str = "ArrowRight", widget: int = 0) -> None:
    """Press a key on a slider's handle, and wait until the figure of `widget` has changed."""
    before = figure(page, widget)
    handle = page.locator(".noUi-handle").nth(number)
    handle.focus()
    handle.press(key)
    page.wait_for_function(
        "([i, old]) => document.querySelectorAll('.widget-html-content')[i].innerHTML !== old",
        arg=[widget, before],
        timeout=15_000,
    )


def shoot(page: Any, name: str) -> Path:
    """Save a screenshot in build/screenshots; return its path."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    path = SHOTS / f"{name}.png"
    page.screenshot(path=str(path))
    return path
