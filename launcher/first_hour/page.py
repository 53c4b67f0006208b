"""Section of `docs/hardware.md` about the results of the first hour: `python -m launcher.first_hour.page --write`."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.first_hour.results import Result, read_all
from launcher.first_hour.shares import shares

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "hardware.md"
RESULTS = ROOT / "benchmarks" / "results" / "first_hour" / "first_hour.json"
BEGIN, END = "<!-- first hour: begin -->", "<!-- first hour: end -->"
_UNITS = {"bytes_s": (1e9, "GB/s"), "flops": (1e12, "TFLOP/s")}


def section(results: Sequence[Result]) -> str:
    """The section as Markdown: a line a stage, and the rates of the device."""
    if not results:
        return "No results are committed: no GPU has been asked yet."
    first = results[0]
    lines = [f"Device: {first.device or 'unknown'}, {first.began_at}.", ""]
    lines += ["| stage | decides | outcome | seconds | tests passed, failed, skipped |", "|---|---|---|---|---|"]
    for result in results:
        counts = "-"
        if (tests := result.tests) is not None:
            counts = f"{tests.passed}, {len(tests.failed)}, {len(tests.skipped)}"
        lines.append(f"| {result.stage} | {result.decides} | {result.outcome} | {result.seconds:.0f} | {counts} |")
    rates = first.record.get("rates") if isinstance(first.record, Mapping) else None
    if isinstance(rates, Mapping):
        lines += ["", "| rate | value |", "|---|---|", *(_rate(str(name), value) for name, value in rates.items())]
    if (found := shares(results)) is not None:
        lines += [
            "",
            f"As options of `megatron-rl plan`: `--gpu {found.gpu} --product-share {found.product_share:.2f} "
            f"--bandwidth-share {found.bandwidth_share:.2f}`. They are ceilings, because whole steps reach less.",
        ]
    return "\n".join(lines)


def _rate(name: str, value: object) -> str:
    title, unit = next((name.removesuffix(f"_{ending}"), ending) for ending in _UNITS if name.endswith(ending))
    scale, shown = _UNITS[unit]
    return f"| {title.replace('_', ' ')} | {float(str(value)) / scale:.4g} {shown} |"


def with_section(page: str, results: Sequence[Result]) -> str:
    """The page with the section of these results in the place of the earlier one."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section(results)}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the section, or write the page of this checkout."""
    parser = argparse.ArgumentParser(prog="python -m launcher.first_hour.page", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/hardware.md of this checkout")
    results = read_all(RESULTS)
    if parser.parse_args(argv).write:
        PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    else:
        print(section(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
