"""`kv-serve recommend --measure`: a search over policies in a terminal."""

import shlex
from typing import TYPE_CHECKING

import typer

from kv_eval.cli.evaluation import SAVED, resumable
from kv_transformers.cli.console import err, progress, refuse, refusing, remark, writing
from kv_transformers.cli.options import Dtype, caches_by, expect_backend, load_model, reading_policy

if TYPE_CHECKING:
    from kv_eval.evaluate.journal import Journal
    from kv_eval.recommend.search import TextSearch
    from kv_transformers.from_text import MakeCache
    from kv_transformers.search import SearchOptions

NOTHING = 1  # exit status without a recommendation


def search(options: "SearchOptions") -> None:
    """Search for a policy on a model, write the result, and print the verdict.

    Every finished sample is saved beside the result at once: the same command resumes.
    """
    from kv_eval.cli.recommend_shown import show, smallest
    from kv_eval.evaluate.journal import open_journal
    from kv_eval.evaluate.machine import machine
    from kv_eval.evaluate.provenance import commit
    from kv_eval.evaluate.report import Report
    from kv_eval.evaluate.specs import read_specs
    from kv_eval.recommend.grid import grid
    from kv_eval.recommend.halving import Arm, Halving
    from kv_eval.recommend.search import TextSearch, fitting
    from kv_eval.tasks import default_text, read_text
    from kv_policy.installing import versions

    with reading_policy(options.model):
        specs = read_specs(options.policies)[1:] if options.policies else grid()
        text = default_text() if options.text is None else read_text(options.text)
    expect_backend(options.backend)
    loaded = load_model(options.model, Dtype(options.dtype), options.device)
    make, served = caches_by(loaded, options.backend)
    with refusing(ValueError), err().status("checking which policies fit"):
        fit, every = fitting(loaded, specs, options.wish, make)
    if not fit:
        refuse(smallest(every, len(specs), options.wish))
    arms = tuple(Arm(spec, each.request_bytes) for spec, each in fit.items())
    made = TextSearch(
        loaded=loaded,
        text=text,
        halving=Halving(arms, options.windows, options.wish.loss, options.precision),
        length=options.length,
        continuation=options.continuation,
        numbers=options.numbers,
        later=options.wish.later,
    )
    remark(
        f"{len(specs):,} policies, of which {len(every):,} support the model and {len(fit):,} fit."
    )
    path = options.json
    partial = path.with_name(path.name + ".partial")
    code, under = commit(), versions()
    settings = made.plan.identity(loaded, text)
    measured = {"numbers": options.numbers, "commit": code, "versions": under}
    with refusing(ValueError):
        journal, sentence = open_journal(
            partial, {**settings, **measured, "attention": str(served)}
        )
    if sentence:
        remark(sentence)
    with resumable(journal, partial):
        _run(made, journal, make)
    report = Report(
        model=loaded.name,
        commit=code,
        versions=under,
        settings=settings,
        machine=machine(),
        attention=served,
        rows=tuple(made.rows(journal)),
    )
    with writing(path, SAVED.format(partial)):
        report.write(path)
    good = show(made, journal, options, fit)
    journal.remove()
    drawn = f"`kv-serve report {shlex.quote(str(path))} --out frontier.html`"
    remark(f"Written to {path}; {drawn} draws it.")
    if not good:
        raise typer.Exit(NOTHING)


def _run(made: "TextSearch", journal: "Journal", make: "MakeCache") -> None:
    with refusing(ValueError), progress() as shown:
        bar = shown.add_task("creating the samples", total=made.total)
        for entry in made.run(journal, make):
            left = len(made.halving.alive)
            words = f"{left:,} left: {entry.policy}" if entry.task == "nll" else entry.policy
            shown.update(bar, advance=1, description=f"{entry.task}, {words}")
