"""Tables of plans."""

from __future__ import annotations

from rich.console import Group

from prb_jax.measure.plan.chips import GIB
from prb_jax.measure.plan.planner import Plan
from prb_jax.measure.plan.policy import PolicyPlan
from prb_jax.measure.plan.sampling import SamplingPlan
from prb_jax.reports.table import Table, facts_table, number


def plan_table(plan: Plan, *, title: str) -> Group:
    """Return the tables of one plan."""
    facts = {
        "fits": "yes" if plan.fits else "no",
        "chips, mesh, batch": f"{plan.chips}, {plan.mesh}, {plan.batch}",
        "peak a chip": f"{_gib(plan.peak_bytes_per_chip)} of {_gib(plan.hbm_bytes_per_chip)}",
        "  arguments": _gib(plan.argument_bytes_per_chip),
        "  temporaries": _gib(plan.temp_bytes_per_chip),
        "attention": plan.attention,
        **({"remat": plan.remat} if plan.remat else {}),
    }
    if plan.tokens:
        facts["tokens of the trees"] = f"{plan.tokens:,}, what they share once"
        facts["  computed, in streams"] = _padded(plan.computed_tokens, plan.tokens)
    if plan.vain_pairs is not None:
        facts["  pairs in vain, in the kernel"] = f"{100 * plan.vain_pairs:.1f} %"
    facts["FLOPs of a step"] = f"{plan.flops:.3g}"
    if plan.estimated_seconds is not None:
        facts["step, at best"] = _seconds(plan)
        facts |= {f"  {side}": f"{seconds:.3g} s" for side, seconds in plan.seconds_by.items()}
        facts["MFU, at best"] = _mfu(plan)
    facts["compiled in"] = f"{plan.compile_seconds:.1f} s"
    if plan.note:
        facts["note"] = plan.note
    parts = [facts_table(facts.items(), title=title)]
    if plan.collectives:
        sent = sorted(plan.collectives.items())
        rows = [(kind, f"{moved.count:,}", _gib(moved.bytes)) for kind, moved in sent]
        parts.append(Table("", ("collective", "runs", "a chip sends"), rows))
    return Group(*parts)


def sampling_table(plan: SamplingPlan, *, title: str) -> Group:
    """Return the tables of a sampling plan."""
    facts = [
        ("cache of the prompts, a chip", _gib(plan.prefix_cache_bytes_per_chip)),
        ("cache of the samples, a chip", _gib(plan.sample_cache_bytes_per_chip)),
    ]
    if plan.tokens_per_second is not None:
        facts.append(("tokens a second, at best", f"{plan.tokens_per_second:,.0f}"))
    return Group(
        plan_table(plan.plan, title=title), facts_table(facts, title="Sampling"), *_engines(plan.plan.fits)
    )


def sweep_table(plans: tuple[Plan, ...], *, title: str) -> Group:
    """Return the table of several plans in the given order, best first."""
    columns = {
        "mesh": lambda plan: plan.mesh,
        "batch": lambda plan: f"{plan.batch:,}",
        "fits": lambda plan: "yes" if plan.fits else "no",
        "peak a chip": lambda plan: _gib(plan.peak_bytes_per_chip),
        "step, at best": _seconds,
        "MFU, at best": _mfu,
    }
    return Group(Table.of(title, plans, columns))


def policy_table(policy: PolicyPlan, *, title: str) -> Group:
    """Return the tables of a policy plan: memory held and shared, and the costs of each program."""
    room = _gib(policy.hbm_bytes_per_chip)
    facts = [
        ("fits", "yes" if policy.fits else "no"),
        ("mesh, prompts", f"{policy.mesh}, {policy.batch}"),
        ("remat", policy.remat),
        ("peak a chip", f"{_gib(policy.peak_bytes_per_chip)} of {room}"),
    ]
    held = [(part, _gib(size), policy.shared.get(part, "")) for part, size in policy.held.items()]
    held.append(("all", _gib(sum(policy.held.values())), ""))
    meanings = {"place": "place: split weights for drawing", "draw": "draw: one token per rollout"}
    programs = [
        (meanings.get(name, name), _gib(policy.peaks[name]), _seconds(plan))
        for name, plan in policy.programs.items()
    ]
    return Group(
        facts_table(facts, title=title),
        Table("", ("held", "a chip", "shares"), held),
        Table("", ("program", "peak a chip, with all held memory", "time, at best"), programs),
        *_engines(policy.fits),
    )


def _engines(fits: bool) -> tuple[str, ...]:
    """Return advice for a policy that does not fit."""
    if fits:
        return ()
    return (
        "It does not fit. Use more chips, or let an engine draw and train: tunix on TPUs, TRL or verl with vLLM on "
        "GPUs, with this reward by prb.reward_fn or prb serve (docs/engines.md); texts: prb sample --endpoint.",
    )


def verdict(plan: Plan) -> str:
    """Return a one-line summary of a plan."""
    size = f"{_gib(plan.peak_bytes_per_chip)} of {_gib(plan.hbm_bytes_per_chip)} a chip"
    seconds = "" if plan.estimated_seconds is None else f", {_seconds(plan)}"
    return f"{'fits' if plan.fits else 'does not fit'}, {size}{seconds}"


def _seconds(plan: Plan) -> str:
    return number(plan.estimated_seconds, "{:.3g} s")


def _mfu(plan: Plan) -> str:
    return number(plan.estimated_mfu and 100 * plan.estimated_mfu, "{:.1f} %")


def _padded(computed: int, tokens: int) -> str:
    return f"{computed:,} ({100 * (1 - tokens / computed):.1f} % padding)"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 1024**2:.2f} MiB"
