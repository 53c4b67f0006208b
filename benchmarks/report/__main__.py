"""Seconds until pages of a run of 10,000 steps and 64 engines are open: dashboard, report, comparison of three runs.

`python -m benchmarks.report --json OUT [--quick]` writes invented run directories of that size, runs the commands, and
lets headless Chromium lay out and paint each page. A machine without Chromium has no seconds of the browser.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.record import Goal, Row, arguments, write
from benchmarks.report.large_run import Size, write_large_run

LARGE = Size(num_steps=10_000, num_engines=64, trace_bytes=80 << 20)
QUICK = Size(num_steps=200, num_engines=4, trace_bytes=1 << 20)
BOUND_S = 3.0
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_TIMEOUT_S = 120
FLAGS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--window-size=1280,900"),
)
EMPTY = "empty page"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every page and write the record."""
    parser = arguments("Seconds until the pages of a large run are open.")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    size, repeats = (QUICK, 1) if options.quick else (LARGE, options.repeats)
    browser = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    with tempfile.TemporaryDirectory() as folder:
        rows = _measure(Path(folder), size, repeats=repeats, browser=browser)
    unmeasured = ["run directories on a network file system"]
    write(
        options.json,
        rows=rows,
        goals=[] if options.quick or browser is None else _goals(rows),
        not_measured=unmeasured if browser else [*unmeasured, "the browser: there is no Chromium on this machine"],
    )
    return 0


def _measure(folder: Path, size: Size, *, repeats: int, browser: str | None) -> list[Row]:
    runs = [str(folder / name) for name in ("a", "b", "c")]
    for seed, run in enumerate(runs):
        write_large_run(Path(run), size, seed=seed, settings={"seed": seed})
    empty, dashboard, comparison = (folder / f"{name}.html" for name in ("empty", "dashboard", "comparison"))
    empty.write_text("<!doctype html><title>empty</title>", encoding="utf-8")
    commands: dict[str, tuple[Path, list[str]]] = {
        "dashboard": (dashboard, ["dashboard", runs[0], "--output", str(dashboard)]),
        "report": (Path(runs[0]) / "report.html", ["report", runs[0]]),
        "comparison": (comparison, ["report", *runs, "--output", str(comparison)]),
    }
    rows: list[Row] = []
    for repeat in range(repeats):
        if browser is not None:
            rows.append({"page": EMPTY, "repeat": repeat, "browser_s": _paint_s(browser, empty, folder)})
        for name, (page, command) in commands.items():
            row: dict[str, str | int | float | bool] = {"page": name, "repeat": repeat, **_write_s(page, command)}
            if browser is not None:
                row["browser_s"] = _paint_s(browser, page, folder)
            rows.append(row)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def _write_s(page: Path, command: Sequence[str]) -> Mapping[str, float]:
    """Seconds until the page is there and until the command ends, its CPU time and the bytes of the page.

    Raises:
        RuntimeError: the command failed.
    """
    page.unlink(missing_ok=True)
    began, before = time.perf_counter(), os.times()
    process = subprocess.Popen([sys.executable, "-m", "launcher", *command], stdout=subprocess.DEVNULL)
    while not page.exists() and process.poll() is None:
        time.sleep(0.005)
    page_s = time.perf_counter() - began
    if process.wait() != 0:
        raise RuntimeError(f"`megatron-rl {' '.join(command)}` ended with exit code {process.returncode}")
    after = os.times()
    return {
        "page_s": round(page_s, 3),
        "command_s": round(time.perf_counter() - began, 3),
        "cpu_s": round(after.children_user + after.children_system - before.children_user - before.children_system, 3),
        "page_bytes": page.stat().st_size,
    }


def _paint_s(browser: str, page: Path, folder: Path) -> float:
    """Seconds from the start of a fresh browser to a picture of the page."""
    with tempfile.TemporaryDirectory(dir=folder) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}", f"--screenshot={folder / 'page.png'}"]
        if os.geteuid() == 0:  # Chromium has no sandbox for root
            flags.append("--no-sandbox")
        began = time.perf_counter()
        subprocess.run([browser, *flags, page.as_uri()], check=True, capture_output=True, timeout=BROWSER_TIMEOUT_S)
        return round(time.perf_counter() - began, 3)


def _goals(rows: Sequence[Row]) -> list[Goal]:
    """Writing a page and showing it in a browser that already runs: the start is that of an empty page."""

    def median(page: str, field: str) -> float:
        return statistics.median(float(row[field]) for row in rows if row["page"] == page)

    return [
        Goal(
            name=f"{page} of 10,000 steps and 64 engines is open",
            value=median(page, "page_s") + max(0.0, median(page, "browser_s") - median(EMPTY, "browser_s")),
            bound=BOUND_S,
            direction="at most",
            unit="s",
        )
        for page in ("dashboard", "report")
    ]


if __name__ == "__main__":
    sys.exit(main())
