"""The model card: what a published head is, measured and made of, from the files of its run."""

import hashlib
import math
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from scipy import stats

from . import __version__
from .errors import UserError
from .evaluation.evaluation_file import Result
from .evaluation.run_folder import PROVENANCE, Run, read_provenance
from .export.layout import Export, is_local

KINDS = {"medusa": "Medusa", "eagle1": "EAGLE-1", "eagle3": "EAGLE-3", "mtp": "Multi-token prediction"}
CONFIDENCE = 0.95


def model_card(run: Run, export: Export, verifier: str, license: str) -> str:
    """README.md of a repository. verifier: its hub id; license: as the hub spells it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.filters["count"] = "{:,}".format
    return environment.get_template("card.md.j2").render(
        run=run,
        export=export,
        verifier=verifier,
        license=license,
        kind=KINDS[run.evaluation.head.kind],
        rows=[acceptance_row(result) for result in run.evaluation.results],
        hashes=hashes(run),
        recipe=public_recipe(run.recipe, verifier),
        version=__version__,
    )


def acceptance_row(result: Result) -> dict[str, Any]:
    identical = {True: "yes", False: "NO", None: "–"}[result.identical_to_greedy]
    return {
        "tree": result.tree,
        "chosen": result.chosen,
        "rounds": result.rounds,
        "emitted": result.emitted,
        "tau": "–" if result.tau is None else f"{result.tau:.3f} ± {tau_margin(result.accepted_histogram):.3f}",
        "survival": ", ".join(share(round(s * result.rounds), result.rounds) for s in result.survival if s is not None),
        "identical": identical,
        "speedup": "–" if result.speedup is None else f"{result.speedup:.2f}x",
    }


def share(count: int, rounds: int) -> str:
    """A share with its Wilson interval: 0.31 (0.28 to 0.34)."""
    interval = stats.binomtest(count, rounds).proportion_ci(CONFIDENCE, method="wilson")
    return f"{count / rounds:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def tau_margin(histogram: list[int]) -> float:
    """Half the normal interval of the mean of accepted drafts; histogram[a]: rounds that accepted a."""
    rounds = sum(histogram)
    mean = sum(a * count for a, count in enumerate(histogram)) / rounds
    variance = sum(count * (a - mean) ** 2 for a, count in enumerate(histogram)) / max(rounds - 1, 1)
    return float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * math.sqrt(variance / rounds)


def hashes(run: Run) -> dict[str, str]:
    """What the head came from. Weights of the verifier, samples and recipe by their hashes."""
    made = read_provenance(run.folder)
    if made is None:
        raise UserError(f"{run.folder / PROVENANCE} is missing; `headstart train` writes it (a finished run is not "
                        "trained again)")  # fmt: skip
    data = made.data
    return {
        "verifier's weights": made.verifier.fingerprint,
        "chat template, SHA-256": made.template,
        "data": f"{data.samples:,} samples, {data.tokens:,} tokens, {data.supervised:,} supervised",
        "data, SHA-256": data.sha256,
        "recipe, SHA-256": hashlib.sha256(run.recipe.encode()).hexdigest(),
    }


def public_recipe(text: str, verifier: str) -> str:
    """The recipe with files by their names alone, and the verifier by its hub id."""
    recipe = shown(yaml.safe_load(text))
    recipe["verifier"]["model"] = verifier
    return yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None, width=120)


def shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shown(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shown(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and is_local(value) else value
