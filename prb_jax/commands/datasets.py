"""Verbs that write data sets: `prb personas`, `past-texts`, `prepare`, `split` and `rank-profiles`."""

import argparse

from prb_jax.commands.arguments import REWARD_MODEL, Parser, call, chosen, given_flags, with_columns
from prb_jax.commands.process import start
from prb_jax.commands.values import not_negative, positive
from prb_jax.errors import RunError
from prb_jax.models import DTYPES
from prb_jax.models.readouts.load_options import LoadOptions
from prb_jax.text.view import PROTOCOLS, ViewOptions


def add_personas(sub: Parser) -> None:
    sub.option("--out DIR", "Folder for the files", required=True)


def run_personas(options: argparse.Namespace) -> None:
    """Write the parts, and print their paths."""
    from prb_jax.records.sources import personas

    for part, path in personas.write(options.out).items():
        print(f"{path}: {len(personas.load(part)):,} comparisons")


def add_past_texts(sub: Parser) -> None:
    sub.option("--inputs FILE", "JSON file: a list of {id, input, profile}", required=True)
    sub.option("--outputs FILE", "JSON file: {golds: [{id, output}]}", required=True)
    sub.option(
        "--samples DIR ...", "Runs of `prb sample` on an output without --samples", default=[], extend=False
    )
    sub.option("--out FILE", "Output file, .jsonl", required=True)


def run_past_texts(options: argparse.Namespace) -> None:
    """Write the pairs, and print their number."""
    from prb_jax.behaviour.generation.past_texts import past_texts

    written = call(past_texts, options)
    print(f"{written.path}: {sum(written.counts.values()):,} pairs of {written.users:,} users")
    for source, count in written.counts.items():
        without = written.without.get(source, 0)
        print(f"{source}: {count:,} pairs" + (f", {without:,} inputs have none" if without else ""))


def add_prepare(sub: Parser) -> None:
    sub.option("--data NAME_OR_PATH ...", "Data sources, see `prb evaluate`; repeatable", required=True)
    sub.columns()
    about = "Splits of the data to read; they keep their names"
    sub.option("--split S ...", about, default=["test"], commas=True)
    sub.option("--out DIR", "Output folder; then valid as --data DIR", required=True)
    sub.option(
        "--model MODEL",
        "Hub id or Hugging Face folder: also write tokens for this model, for `prb evaluate MODEL "
        "--data DIR` and `prb train`; several models may share a folder",
    )
    of_evaluate = {"meaning": "With --model: see `prb evaluate`"}
    sub.fields(ViewOptions, profile_posts=of_evaluate, protocol=of_evaluate, max_length=of_evaluate)
    sub.option(
        "--processes N",
        "With --model: processes that tokenise (default: 1; its tokenizer uses several threads)",
        positive,
    )
    sub.fields(LoadOptions, REWARD_MODEL)


def run_prepare(options: argparse.Namespace) -> None:
    """Write the data set and the tokens, and print counts."""
    from prb_jax.records.sources.prepare import prepare

    others = given_flags(options) - {"--data", "--columns", "--rendered", "--split", "--out"}
    if options.model is None and others:
        raise RunError(f"{min(others)}: is only for the tokens of a model: it requires --model")
    options.data = [with_columns(source, options) for source in options.data]
    prepared = prepare(options.data, out=options.out, splits=options.split)
    stores = []
    if options.model is not None:
        from prb_jax.scoring.write_tokens import TokensJob, write_store

        loading, view = chosen(options, LoadOptions), chosen(options, ViewOptions)
        job = TokensJob(model=options.model, loading=loading, view=view, folder=prepared.folder)
        stores = [write_store(job, split=split, processes=options.processes or 1) for split in options.split]
    for split, count in prepared.counts.items():
        print(f"{split}: {count:,} comparisons")
    print(f"written to {prepared.folder}")
    for store in stores:
        print(f"tokens written to {store}")


def add_split(sub: Parser) -> None:
    sub.option("--by", "What no two parts share", choices=("user", "question"), required=True)
    sub.option("--data NAME_OR_PATH", "Data source, see `prb evaluate --data`", required=True)
    sub.columns()
    sub.option("--out DIR", "Folder for PART.jsonl; then valid as --data DIR", required=True)
    sub.option(
        "--parts PART=SHARE ...",
        "Names and shares of the parts (default: train=0.8 validation=0.1 test=0.1)",
        _share,
        extend=False,
    )
    sub.option("--seed N", "Seed of the shuffle", not_negative, default=0)


def _share(text: str) -> tuple[str, float]:
    name, equals, share = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected PART=SHARE, found {text!r}")
    return name, float(share)


def run_split(options: argparse.Namespace) -> None:
    """Split, and print the counts of each part."""
    from prb_jax.records.sources.split import PARTS, split

    given = options.parts or list(PARTS.items())
    if len(dict(given)) < len(given):
        options.parser.error("argument --parts: a part is named twice")
    data = with_columns(options.data, options)
    made = split(data, by=options.by, out=options.out, parts=dict(given), seed=options.seed)
    for part in made.parts.values():
        counts = f"{part.comparisons:,} comparisons, {part.users:,} users, {part.questions:,} questions"
        print(f"{part.path}: {counts}")
    other = "questions" if options.by == "user" else "users"
    print(f"no {options.by} is in two parts; {made.shared:,} {other} are")


def add_rank_profiles(sub: Parser) -> None:
    sub.option("--encoder E", "Ranker: bm25, recency, or a model (folder or hub id)", required=True)
    sub.option("--data NAME_OR_PATH", "Data source, see `prb evaluate --data`", required=True)
    sub.option("--out FILE", "Output file, .jsonl or .jsonl.gz", required=True)
    sub.option(
        "--protocol",
        "Protocol; paper: ids keep their places while posts move, as in the paper's script",
        default="default",
        choices=PROTOCOLS,
    )
    sub.option("--mesh M", "Mesh of a model, e.g. data=4 (default: all devices)")
    sub.option("--dtype", "Type of a model's weights (default: the checkpoint's)", choices=DTYPES)
    sub.option(
        "--max-length L",
        "Longest text of a model in tokens; longer texts lose their end (default: the model's)",
        positive,
    )
    sub.option("--revision R", "Branch, tag or commit of a model on the hub")
    sub.long_run("nothing was kept", distributed=False)


def run_rank_profiles(options: argparse.Namespace) -> None:
    """Order each user's posts by relevance to the question, and print counts."""
    from prb_jax.study.retrieval.rank_profiles import RANKERS, rank_profiles

    if options.encoder not in RANKERS:
        start(options)
    ranked = call(rank_profiles, options)
    print(f"{ranked.path}: {ranked.records:,} comparisons, {ranked.profiles:,} with a ranked profile")
    if ranked.texts:
        cut = f"{ranked.truncated:,} of them cut to the encoder's length"
        print(f"{ranked.texts:,} distinct texts embedded, {cut}")
