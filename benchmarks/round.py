"""What a round of speculative decoding costs beside the verifier pass it needs: `python benchmarks/round.py RUN [--tree ..]`.

For each tree the held-out prompts are decoded one at a time and the seconds of draft, verify and other are divided by the
rounds. `bare` is a verifier forward of the same number of nodes, logits and argmax included, behind a context of the middle
length of those rounds, in the same process and between the decodings. `other` is the loop's own cost: choosing the path,
committing it, keeping the account; its share of the round should stay below 5 %.
"""

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headstart.build import build_evaluator, build_samplings, build_tree
from headstart.build_data import held_out
from headstart.build_drafters import build_drafters
from headstart.cli_trees import overrides
from headstart.evaluation.advise import seconds, verifier_pass
from headstart.evaluation.evaluate import Evaluator
from headstart.evaluation.sampling import Sampling
from headstart.evaluation.tree import AnyTree
from headstart.heads.drafter import Drafter
from headstart.runs import open_run
from headstart.training.recipe import load_recipe

TREES = ["chain:4", "dynamic:4,8,16", "dynamic:5,10,32", "dynamic:5,10,64"]
GOAL = 0.05  # of the round, for `other`


@dataclass(frozen=True)
class Cost:
    """Milliseconds a round."""

    nodes: int
    rounds: int
    draft: float
    verify: float
    other: float
    bare: float

    @property
    def share(self) -> float:
        return self.other / (self.draft + self.verify + self.other)


def cost(evaluator: Evaluator, drafter: Drafter, tree: AnyTree, sampling: Sampling, repeats: int) -> Cost:
    """Medians over repeats of decoding all prompts; the bare pass is measured before each."""
    evaluator.decode(drafter, tree, evaluator.prompts[:1], 1, sampling)  # warm
    rounds: list[int] = []
    runs, bare = [], []
    for _ in range(repeats):
        decoded, spent = evaluator.decode(drafter, tree, evaluator.prompts, 1, sampling)
        contexts = [r.context for answer in decoded for r in answer.rounds]
        rounds = [len(answer.rounds) for answer in decoded]
        runs.append({part: 1000 * value / sum(rounds) for part, value in spent.items()})
        context = sorted(contexts)[len(contexts) // 2]
        bare.append(1000 * seconds(evaluator.verifier, verifier_pass(evaluator.verifier, 1, context, tree.nodes)))
    parts = (statistics.median(run[part] for run in runs) for part in ("draft", "verify", "other"))
    return Cost(tree.nodes, sum(rounds), *parts, statistics.median(bare))


def table(costs: list[tuple[str, Cost]]) -> Table:
    columns = ("tree", "nodes", "rounds", "draft", "verify", "other", "share", "bare", "verify / bare")
    found = Table(*columns, title="milliseconds a round")
    for name, one in costs:
        share = f"{one.share:.1%}" + ("" if one.share < GOAL else " !")
        times = [f"{value:.2f}" for value in (one.draft, one.verify, one.other)]
        found.add_row(name, str(one.nodes), str(one.rounds), *times, share, f"{one.bare:.2f}", f"{one.verify / one.bare:.2f}")
    return found


def main(arguments: list[str] | None = None) -> list[tuple[str, Cost]]:
    parser = argparse.ArgumentParser(description="Round time against the bare verifier pass.")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--tree", action="append", help="as `headstart eval` takes it; may be repeated")
    parser.add_argument("--drafter", default="head", help="as `headstart eval` takes it")
    parser.add_argument("--temperature", default="0", help="0 is greedy")
    parser.add_argument("--rule", default="candidates", help="at temperatures above 0")
    parser.add_argument("--prompts", type=int, default=2, help="held-out prompts")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    asked = [*overrides([given.drafter], given.tree or TREES, []), f"evaluation.prompts={given.prompts}"]
    asked += [f"evaluation.temperatures=[{given.temperature}]", f"evaluation.rule={given.rule}"]
    recipe = load_recipe(given.run / "recipe.yaml", [*asked, f"evaluation.max_new_tokens={given.tokens}"])
    (sampling,) = build_samplings(recipe)
    _, head, verifier = open_run(given.run)
    evaluator = build_evaluator(recipe, verifier, held_out(recipe))
    ((_, drafter),) = build_drafters(recipe, head, verifier)
    trees = [build_tree(section) for section in recipe.evaluation.trees]
    names = given.tree or TREES
    costs = [(text, cost(evaluator, drafter, tree, sampling, given.repeats)) for text, tree in zip(names, trees, strict=True)]
    Console().print(table(costs))
    return costs


if __name__ == "__main__":
    main()
