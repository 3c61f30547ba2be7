"""The way of somebody who ran ``make up``: headless Chromium on the real Prefect and MLflow servers.

With ``PA_PICTURES=FOLDER`` (``make pictures``) the runs have the quickstart's own size and the README's pictures are
taken on the way.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="the browser tests need playwright (pip install -e '.[dev]')")
from playwright.sync_api import Page, TimeoutError, expect, sync_playwright

from pa_core.rollout.address import free_port

ROOT = Path(__file__).parents[2]
PICTURES = os.environ.get("PA_PICTURES")
SMALL = {} if PICTURES else {"Iterations": "3", "Prompts per iteration": "2", "Group size": "2", "Max tokens": "8"}
SIZES = ("iterations=3", "prompts_per_iteration=2", "group_size=2", "sampling.max_tokens=8")
SECOND = () if PICTURES else SIZES
WAIT_MS = 120_000.0
RUN_MS = 1_800_000.0 if PICTURES else 900_000.0


def chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium here (Debian's package is called chromium)")
    return found


@dataclass(frozen=True)
class House:
    """What ``make up`` has started."""

    folder: Path
    prefect: str
    mlflow: str
    environment: dict[str, str]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=self.folder,
            env=self.environment,
            text=True,
            capture_output=True,
            timeout=RUN_MS / 1000,
        )


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """The services on free ports in a folder of their own, with the deployments of the project."""
    chromium()
    folder = tmp_path_factory.mktemp("house")
    for name in ("prefect.yaml", "prefect.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "configs", folder / "configs")
    ports = {"PREFECT_PORT": str(free_port()), "MLFLOW_PORT": str(free_port())}
    environment = {**os.environ, **ports, "PYTHONPATH": str(ROOT)}
    addresses = {name: f"http://127.0.0.1:{value}" for name, value in ports.items()}
    made = House(folder, addresses["PREFECT_PORT"], addresses["MLFLOW_PORT"], environment)
    up = made.run("flows.services", "up")
    try:
        assert up.returncode == 0, up.stdout + up.stderr
        yield made
    finally:
        made.run("flows.services", "down")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with sync_playwright() as playwright:
        # As root, as in containers, Chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(WAIT_MS)
        expect.set_options(timeout=WAIT_MS)
        page.emulate_media(reduced_motion="reduce")
        # MLflow explains its buttons on the first visit; nothing can be clicked before that is read.
        page.add_locator_handler(page.get_by_role("button", name="Got it"), lambda got_it: got_it.click())
        yield page
        page.screenshot(path=tmp_path / "last.png")  # what a failed test saw
        browser.close()


def picture(page: Page, name: str) -> None:
    """Keep what the page shows, when pictures are wanted."""
    if PICTURES:
        close = page.get_by_role("button", name="Close", exact=True)
        if close.is_visible():  # MLflow's assistant, which opens by itself
            close.click()
        page.wait_for_timeout(5000)  # charts are drawn after everything is loaded, and nothing says when they are
        page.screenshot(path=Path(PICTURES) / f"{name}.png")


def start_quickstart(page: Page, house: House) -> None:
    """Fill in the form of the quickstart deployment and submit it; the page shows the started flow run."""
    page.goto(f"{house.prefect}/v2/deployments", wait_until="domcontentloaded")
    page.get_by_placeholder("Search deployments").fill("quickstart")
    page.get_by_role("link", name="quickstart", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Custom run").click()
    seed = page.get_by_label("Seed (Optional)", exact=True).first
    expect(seed).to_have_value("0")
    expect(page.get_by_text("K: samples per prompt.")).to_be_visible()  # what a key means stands beside it
    for label, value in SMALL.items():
        page.get_by_label(f"{label} (Optional)", exact=True).first.fill(value)
    seed.fill("5")
    picture(page, "prefect-form")
    submit, started = page.get_by_role("button", name="Submit"), page.get_by_role("link", name="View run")
    submit.click()
    with suppress(TimeoutError):  # a click while the form still takes in what was typed does nothing
        started.wait_for(timeout=WAIT_MS / 6)
    if submit.is_visible():
        submit.click()
    started.click()


def test_a_run_is_started_watched_and_compared_in_the_browser(page: Page, house: House) -> None:
    start_quickstart(page, house)
    expect(page.get_by_text("Completed").first).to_be_visible(timeout=RUN_MS)
    page.reload()  # the graph of tasks fits itself into its frame when it is loaded
    expect(page.get_by_text("Completed").first).to_be_visible()
    picture(page, "prefect")

    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_role("link").filter(has_text="held-out accuracy").click()
    expect(page.get_by_text("tokens per second").first).to_be_visible()

    page.go_back()
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_role("link").filter(has_text="mlflow-run").click()
    link = page.get_by_role("link", name=re.compile("MLflow"))
    name = link.inner_text().removeprefix("MLflow: ")
    assert (link.get_attribute("href") or "").startswith(house.mlflow)
    link.click()
    expect(page.get_by_text(name).first).to_be_visible()
    expect(page.get_by_text("reward/mean").first).to_be_visible()
    page.get_by_role("tab", name="Model metrics").click()
    page.get_by_placeholder("Search metric charts").fill("reward")
    picture(page, "mlflow")

    second = house.run("pa_core.cli", "train", "configs/quickstart.yaml", "seed=5", "schedule.stream=false", *SECOND)
    assert second.returncode == 0, second.stderr
    compare_in_mlflow(page, house, name)


def compare_in_mlflow(page: Page, house: House, periodic: str) -> None:
    """From the experiment's list of runs to the page that has both beside each other."""
    page.goto(house.mlflow, wait_until="domcontentloaded")
    page.get_by_role("link", name="periodic-asynchrony").first.click()
    page.get_by_role("link", name="Training runs").click()
    page.get_by_role("checkbox", name="Select all runs").check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("row").filter(has_text="optimizer.learning_rate")).to_have_count(1)
    page.get_by_role("switch", name="Parameters - Show diff only").click()
    expect(page.get_by_role("row").filter(has_text="optimizer.learning_rate")).to_have_count(0)
    differing = page.get_by_role("row").filter(has_text="schedule.stream")
    expect(differing).to_contain_text("true")
    expect(differing).to_contain_text("false")
    expect(page.get_by_text(periodic).first).to_be_visible()
    expect(page.get_by_role("link", name="perf/overlap")).to_be_visible()
