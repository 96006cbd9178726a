"""Task quality of a served model: FullKV first, then sparse arms over the same prompts.

    python benchmark/task_quality.py RECIPE --model-path MODEL

Recipes: ruler-synthetic, ruler-16k, ruler-32k, longbench, infinitebench, math500, aime26
(``quality/recipes.py``).  Every arm is an SGLang server of its own; budgets are chosen per request.
Everything that is not listed below goes to SGLang.  The harness is lm-evaluation-harness
(``pip install '.[bench]'``); what it has to download is fetched at the first run of a recipe, and
``ruler-synthetic`` needs nothing.

FullKV runs first and stands for the harness: where model and prompts are the paper's, its mean has to come
within the recipe's tolerance, otherwise no sparse arm is run (``--any-fullkv`` goes on).  Sparse arms have
to send the same prompts, token for token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import results_file
from locks_sglang import cpu_stand_ins
from quality.recipes import RECIPES, Recipe
from serving.server import Server, launched, on_gpu, stop_when_told_to_end
from serving.variants import Variant

PAPER = Path(__file__).parent / "quality" / "paper.json"
ARMS = "oracle,locks:r8i4,locks:r6h,locks:r4i4,locks:r2i4,quest"
BUDGETS = "64,128,256,512,1024,2048"
FEWSHOT_SEED = 1234  # the harness's own

Row = dict[str, Any]


class HarnessDiffers(RuntimeError):
    """FullKV is too far from the paper, or an arm saw other prompts than FullKV."""


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--model-path", required=True)
    parser.add_argument(
        "--arms", default=ARMS, help="SELECTOR[:FORMAT[:BACKEND]], ...; empty for FullKV alone"
    )
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--tasks", help="some of the recipe's tasks")
    parser.add_argument("--limit", type=int, help="prompts a task, instead of the recipe's")
    parser.add_argument("--length", type=int, help="tokens of a RULER prompt, instead of the recipe's")
    parser.add_argument("--repeats", type=int, help="answers a prompt, instead of the recipe's")
    parser.add_argument("--max-length", type=int, help="tokens of a request; default: the model's")
    parser.add_argument("--concurrent", type=int, default=8, help="requests at a time")
    parser.add_argument(
        "--dense-backend", help="attention backend of FullKV; default: fa3, torch_native on a CPU"
    )
    parser.add_argument(
        "--frozen", type=Path, help="result file whose FullKV stands for this run; rows are kept"
    )
    parser.add_argument("--any-fullkv", action="store_true", help="go on whatever FullKV scores")
    parser.add_argument("--out", type=Path, help="folder of the result file, logs and answers")
    parser.add_argument("--machine-name", default="h200")
    parser.add_argument("--commit", help="commit to write down where git is not there")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments, flags = parse_arguments(argv)
    if not on_gpu():
        cpu_stand_ins.activate()
    recipe = adjusted(RECIPES[arguments.recipe], arguments)
    backend = arguments.dense_backend or ("fa3" if on_gpu() else "torch_native")
    rows: list[Row] = json.loads(arguments.frozen.read_text())["rows"] if arguments.frozen else []
    arms = [] if arguments.frozen else [Variant.parse(f"dense:{backend}", backend)]
    arms += [Variant.parse(name, backend) for name in arguments.arms.split(",") if name]
    budgets = [int(budget) for budget in arguments.budgets.split(",")]
    logs = arguments.out or Path(tempfile.mkdtemp(prefix="quality-"))
    logs.mkdir(parents=True, exist_ok=True)
    results_file.machine()
    tasks = load_tasks(recipe, arguments.model_path)
    for number, arm in enumerate(arms, 1):
        log = logs / f"server-{arm.name.replace(':', '-')}.log"
        own = [
            *arm.flags(max(2048, *budgets), always_sparse=True),
            "--max-running-requests",
            str(arguments.concurrent),
        ]
        with launched([*own, "--model-path", arguments.model_path, *flags], log) as server:
            for budget in [None] if arm.dense else budgets:
                name = "FullKV" if arm.dense else f"{arm.name}, b = {budget}"
                say(f"[{number}/{len(arms)}] {name}")
                new = measure(server, arm, budget, recipe, tasks, arguments, logs)
                check_same_prompts(rows, new)
                rows += new
                path = results_file.write(
                    f"quality-{arguments.recipe}",
                    rows,
                    machine_name=arguments.machine_name,
                    out=arguments.out,
                    made_from=arguments.commit,
                )
        if arm.dense:
            check_fullkv(rows, recipe, arguments)
    say(f"written to {path}; logs and answers in {logs}")
    return 0


def adjusted(recipe: Recipe, arguments: argparse.Namespace) -> Recipe:
    """The recipe with what the command line changes."""
    if arguments.length and recipe.length is None:
        raise SystemExit(f"--length is for RULER recipes, not for {arguments.recipe}")
    length = arguments.length or recipe.length
    tasks = recipe.tasks
    if arguments.tasks:
        chosen = arguments.tasks.split(",")
        if unknown := set(chosen) - set(tasks):
            raise SystemExit(f"{', '.join(sorted(unknown))}: not in the recipe; legal: {', '.join(tasks)}")
        tasks = {name: tasks[name] for name in chosen}
    return replace(
        recipe,
        tasks=tasks,
        length=length,
        metric=str(length) if length else recipe.metric,
        limit=arguments.limit or recipe.limit,
        repeats=arguments.repeats or recipe.repeats,
    )


def load_tasks(recipe: Recipe, model: str) -> dict[str, Any]:
    """The harness's task objects; made once, so that every arm has the same documents."""
    from lm_eval.tasks import TaskManager

    overrides = dict(recipe.overrides)
    if recipe.length:
        from lm_eval.tasks.ruler.common_utils import aggregate_metrics

        # The harness lists some lengths only.
        metric = {"metric": recipe.metric, "aggregation": aggregate_metrics, "higher_is_better": True}
        overrides["metric_list"] = [metric]
    metadata = {"tokenizer": model, "max_seq_lengths": [recipe.length]} if recipe.length else {}
    manager = TaskManager(metadata=metadata)
    tasks: dict[str, Any] = {}
    for name in recipe.tasks:
        random.seed(0)  # RULER draws its prompts; they must not depend on which other tasks are run
        # Inside a group the overrides are merged with the task's own configuration.
        tasks |= manager.load({"group": f"only {name}", "task": [{"task": name, **overrides}]})["tasks"]
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return tasks


def measure(
    server: Server,
    arm: Variant,
    budget: int | None,
    recipe: Recipe,
    tasks: dict[str, Any],
    arguments: argparse.Namespace,
    logs: Path,
) -> list[Row]:
    """Scores of every task for one arm and budget."""
    rows = []
    locks = server.locks()
    room = arguments.max_length or server.get("/v1/models")["data"][0]["max_model_len"]
    for name, task in tasks.items():
        begun = time.monotonic()
        runs = [
            run_task(server, budget, recipe, name, task, room, arguments) for _ in range(recipe.repeats)
        ]
        after = server.locks()
        row = {
            "recipe": arguments.recipe,
            "model": Path(arguments.model_path).name,
            "task": name,
            "metric": recipe.metric,
            "selector": "FullKV" if arm.dense else arm.selector,
            "format": locks and locks["format"],
            "budget": budget,
            "length": recipe.length,
            "repeats": recipe.repeats,
            **{key: value for key, value in runs[-1].items() if key not in ("score", "answers")},
            "score": round(100 * statistics.mean(run["score"] for run in runs), 2),
        }
        if locks and after:
            row |= {key: after[key] - locks[key] for key in ("rows_sparse", "rows_dense")}
            locks = after
            if row["rows_sparse"] == 0 and row["prompt_tokens_max"] > (budget or 0):
                raise HarnessDiffers(f"{arm.name}, {name}: no row decoded sparse at a budget of {budget}")
        say(
            f"  {name}: {row['score']:.1f} ({row['prompts']} prompts of {row['prompt_tokens']:.0f} tokens, "
            f"{row['cut_share']:.0%} cut, {time.monotonic() - begun:.0f} s)"
        )
        answers = {
            "arm": arm.name,
            "budget": budget,
            "task": name,
            "answers": [run["answers"] for run in runs],
        }
        with (logs / "answers.jsonl").open("a") as file:
            file.write(json.dumps(answers) + "\n")
        rows.append(row)
    return rows


def run_task(
    server: Server,
    budget: int | None,
    recipe: Recipe,
    name: str,
    task: Any,
    room: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """One run of one task through the harness."""
    from lm_eval import evaluate
    from quality.served import Served

    choice = None if budget is None else {"mode": "sparse", "budget": budget}
    plain = name in recipe.plain
    model = Served(
        server.url,
        arguments.model_path,
        max_length=room,
        choice=choice,
        concurrent=arguments.concurrent,
        think_end=recipe.think_end,
        begin_of_text=plain,  # a chat template brings its own
    )
    # simple_evaluate would index every task of the harness and list every package, at every call.
    found = evaluate(
        lm=model,
        task_dict={"tasks": {name: task}, "groups": {}, "group_map": {}},
        limit=recipe.limit,
        apply_chat_template=not plain,
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = found["samples"][name]
    prompts = hashlib.sha256("".join(sample["prompt_hash"] for sample in samples).encode()).hexdigest()
    return {
        "score": found["results"][name][f"{recipe.metric},none"],
        "prompts": len(samples),
        "prompts_sha256": prompts[:16],
        **model.account(),
        "answers": [sample["resps"] for sample in samples],
    }


def check_same_prompts(rows: list[Row], new: list[Row]) -> None:
    """HarnessDiffers where an arm's prompts are not FullKV's."""
    frozen = {row["task"]: row["prompts_sha256"] for row in rows + new if row["selector"] == "FullKV"}
    for row in new:
        if frozen.get(row["task"]) != row["prompts_sha256"]:
            raise HarnessDiffers(f"{row['selector']} saw other prompts of {row['task']} than FullKV")


def check_fullkv(rows: list[Row], recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Compare FullKV's mean with the paper's where that can be. HarnessDiffers beyond the tolerance."""
    whole = RECIPES[arguments.recipe]
    table = json.loads(PAPER.read_text()).get(arguments.recipe)
    same_model = Path(arguments.model_path).name.lower() == whole.model.split("/")[1].lower()
    if (
        table is None
        or not same_model
        or recipe != adjusted(whole, argparse.Namespace(length=None, tasks=None, limit=None, repeats=None))
    ):
        say("FullKV is not compared with the paper: another model, or a part of the recipe")
        return
    paper = [next(iter(table.values()))[row_name]["FullKV"] for row_name in recipe.tasks.values()]
    ours = [row["score"] for row in rows if row["selector"] == "FullKV"]
    difference = statistics.mean(ours) - statistics.mean(paper)
    say(f"FullKV {statistics.mean(ours):.1f}, the paper's {statistics.mean(paper):.1f}")
    if abs(difference) > recipe.tolerance and not arguments.any_fullkv:
        raise HarnessDiffers(
            f"FullKV is {difference:+.1f} points from the paper, over {recipe.tolerance}: harness, model "
            "or template differ, so sparse scores would not compare (--any-fullkv goes on)"
        )


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    stop_when_told_to_end()
    raise SystemExit(main())
