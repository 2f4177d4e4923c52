"""`prb push`: publish the model of a run."""

import argparse

from prb_jax.commands.arguments import Parser


def add(sub: Parser) -> None:
    """Add the arguments."""
    sub.set_defaults(after_interrupt="nothing was published: all files are one commit")
    sub.option("RUN", "folder of `prb train`, or of `prb evaluate` of a local model", dest="run_folder")
    sub.option("ORG/NAME", "on the hub; made where there is none", dest="repository")
    sub.option("--evaluations RUN ...", "evaluations of this model, whose tables the card gets", default=[])
    sub.option("--dry-run", "print the files and the card, and publish nothing")
    sub.option("--private", "a new repository is private")


def run(options: argparse.Namespace) -> int:
    """Upload, and print where."""
    from prb_jax.reports.push import CARD, prepare_push, push

    if options.dry_run:
        upload = prepare_push(options.run_folder, options.repository, evaluations=options.evaluations)
        print(f"nothing is published: --dry-run. {upload.repository} would get, in one commit:")
        for path in upload.files:
            print(f"  {path.name}  {path.stat().st_size:,} bytes")
        print(f"  {CARD}\n\n{upload.card}", end="")
        return 0
    address = push(
        options.run_folder, options.repository, evaluations=options.evaluations, private=options.private
    )
    print(f"published at {address}")
    return 0
