"""Programs in the compiler's text: loops, collectives and memory, on snippets and on a real program."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prb_jax.errors import RunError
from prb_jax.measure.plan.costs import Collective, group_size, program_costs
from prb_jax.measure.plan.hlo import parse_arrays, parse_module
from tests.plain_process import ROOT, plain_environment

# Three trips by counter (1, 3, 5 < 6 in steps of 2), no note of the compiler; one gather a trip, started
# and finished apart; the types carry layouts, memory spaces and comments as on TPUs.
COUNTED = """\
HloModule loop, is_scheduled=true

%body (state: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %two = s32[] constant(2)
  %state = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %start = (bf16[8,128]{1,0}, bf16[32,128]{1,0:S(1)}) all-gather-start(%x), replica_groups=[1,4]<=[4]
  %done = bf16[32,128]{1,0:S(1)} all-gather-done(%start)
  %y = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%done, %x), kind=kLoop, calls=%pick, metadata={op_name="a (b) c"}
  %copied = s32[]{:T(128)} copy(%i)
  %next = s32[]{:T(128)} add(%copied, %two)
  ROOT %out = (s32[]{:T(128)}, /*index=1*/bf16[8,128]{1,0:T(8,128)(2,1)}) tuple(%next, /*index=1*/%y)
}

%pick (a: bf16[32,128], b: bf16[8,128]) -> bf16[8,128] {
  %a = bf16[32,128]{1,0:S(1)} parameter(0)
  %b = bf16[8,128]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %part = bf16[8,128]{1,0} dynamic-slice(%a, %zero, %zero), dynamic_slice_sizes={8,128}
  ROOT %sum = bf16[8,128]{1,0} add(%part, %b)
}

%condition (state: (s32[], bf16[8,128])) -> pred[] {
  %state = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %limit = s32[]{:T(128)} constant(6)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %first = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) tuple(%one, %x)
  %loop = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) while(%first), condition=%condition, body=%body
  ROOT %y = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""

# Work for another core of the chip, beside the program.
OTHER_CORE = """\
HloModule other_core

%offloaded (a: f32[16]) -> f32[64] {
  %a = f32[16]{0} parameter(0)
  ROOT %gather = f32[64]{0} all-gather(%a), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
}, execution_thread="sparsecore"

%twice (b: f32[64]) -> f32[64] {
  %b = f32[64]{0} parameter(0)
  ROOT %sum = f32[64]{0} add(%b, %b)
}

ENTRY %main (a: f32[16]) -> f32[64] {
  %a = f32[16]{0} parameter(0)
  %start = ((f32[16]{0}), f32[64]{0}, s32[]) async-start(%a), async_execution_thread="sparsecore", calls=%offloaded
  %done = f32[64]{0} async-done(%start)
  ROOT %y = f32[64]{0} fusion(%done), kind=kLoop, calls=%twice
}
"""

# One gather that runs beside three fusions, and an all-reduce of which each chip keeps its part.
SPREAD = """\
HloModule spread

%begin (a: f32[16]) -> (f32[16], f32[64]) {
  %a = f32[16]{0} parameter(0)
  %gather = f32[64]{0} all-gather(%a), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %t = (f32[16]{0}, f32[64]{0}) tuple(%a, %gather)
}

%middle (a: f32[16]) -> f32[64] {
  %a = f32[16]{0} parameter(0)
  ROOT %gather = f32[64]{0} all-gather(%a), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
}

%all-reduce-scatter.1 (b: f32[64]) -> f32[16] {
  %b = f32[64]{0} parameter(0)
  %zero = s32[] constant(0)
  %sum = f32[64]{0} all-reduce(%b), channel_id=8, replica_groups={{0,1,2,3}}
  ROOT %part = f32[16]{0} dynamic-slice(%sum, %zero), dynamic_slice_sizes={16}
}

ENTRY %main (a: f32[16]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  %f1 = (f32[16]{0}, f32[64]{0}) fusion(%a), kind=kCustom, calls=%begin
  %f2 = f32[64]{0} fusion(%a), kind=kCustom, calls=%middle
  %f3 = f32[64]{0} fusion(%a), kind=kCustom, calls=%middle
  ROOT %f4 = f32[16]{0} fusion(%f3), kind=kCustom, calls=%all-reduce-scatter.1
}
"""

# The middle fusion runs in a loop beside the gather, which starts before the loop and ends behind it.
OVERLAPPED = (
    SPREAD.replace(
        """  %f2 = f32[64]{0} fusion(%a), kind=kCustom, calls=%middle
""",
        """  %f2 = f32[16]{0} while(%a), condition=%c, body=%trip, backend_config={"known_trip_count":{"n":"16"}}
""",
    )
    .replace("%f1 =", "%async-collective-start.1 =")
    .replace(
        "ENTRY",
        """%trip (x: f32[16]) -> f32[16] {
  %x = f32[16]{0} parameter(0)
  %step = f32[64]{0} fusion(%x), kind=kCustom, calls=%middle
  ROOT %y = f32[16]{0} fusion(%x), kind=kCustom, calls=%own
}

%own (a: f32[16]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  ROOT %moved = f32[16]{0} collective-permute(%a), channel_id=9, source_target_pairs={{0,1},{1,0}}
}

ENTRY""",
    )
)

BRANCHES = """\
HloModule branches

%light (a: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} parameter(0)
}

%heavy (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %moved = f32[8]{0} collective-permute(%a), channel_id=1, source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (c: pred[], a: f32[8]) -> f32[8] {
  %c = pred[] parameter(0)
  %a = f32[8]{0} parameter(1)
  ROOT %y = f32[8]{0} conditional(%c, %a, %a), branch_computations={%light, %heavy}
}
"""

KNOWN = """\
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %loop = f32[4]{0} while(%x), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"12"}}
}

%b (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %y = f32[4]{0} all-to-all(%x), replica_groups={{0,1}}, dimensions={0}
}

%c (x: f32[4]) -> pred[] {
  %x = f32[4]{0} parameter(0)
  ROOT %y = pred[] custom-call(%x), custom_call_target="unknown"
}
"""


# Of stacked layers one is cut out by a fusion within a fusion, as the sampler's matrices are on TPUs.
NESTED = """\
%cut (stack: f32[28,8,128]) -> f32[8,128] {
  %stack = f32[28,8,128]{2,1,0} parameter(0)
  %layer = f32[1,8,128]{2,1,0} slice(%stack), slice={[3:4], [0:8], [0:128]}
  ROOT %matrix = f32[8,128]{1,0} bitcast(%layer)
}

%product (x: f32[4,8], stack: f32[28,8,128]) -> f32[4,128] {
  %x = f32[4,8]{1,0} parameter(0)
  %stack = f32[28,8,128]{2,1,0} parameter(1)
  %same = f32[28,8,128]{2,1,0} bitcast(%stack)
  %matrix = f32[8,128]{1,0} fusion(%same), kind=kLoop, calls=%cut
  ROOT %y = f32[4,128]{1,0} convolution(%x, %matrix), dim_labels=bf_io->bf
}

ENTRY %main (x: f32[4,8], stack: f32[28,8,128]) -> f32[4,128] {
  %x = f32[4,8]{1,0} parameter(0)
  %stack = f32[28,8,128]{2,1,0} parameter(1)
  ROOT %y = f32[4,128]{1,0} fusion(%x, %stack), kind=kOutput, calls=%product
}
"""


def test_work_for_another_core_counts_too() -> None:
    module = parse_module(OTHER_CORE)
    assert list(module.computations) == ["offloaded", "twice", "main"]
    costs = program_costs(module, chips=4)
    assert costs.collectives == {"all-gather": Collective(1, 3 / 4 * 64 * 4)}


def test_of_stacked_layers_the_one_that_is_cut_out_is_read() -> None:
    assert program_costs(parse_module(NESTED), chips=1).memory_bytes == 4 * (4 * 8 + 8 * 128 + 4 * 128)
    whole = NESTED.replace("fusion(%same), kind=kLoop, calls=%cut", "custom-call(%same)")
    assert program_costs(parse_module(whole), chips=1).memory_bytes == 4 * (4 * 8 + 28 * 8 * 128 + 4 * 128)


def test_a_counted_loop_multiplies_its_body():
    costs = program_costs(parse_module(COUNTED), chips=4)
    shard = 8 * 128 * 2
    assert costs.collectives == {"all-gather": Collective(3, 3 * 3 * shard)}
    assert costs.unknown_loops == 0
    # A trip: the gather reads its shard (its result is not in main memory), the fusion reads x and writes y,
    # the counter is copied and added to.
    assert costs.memory_bytes == 3 * (shard + 2 * shard + 2 * 4 + 3 * 4)


def test_the_compiler_s_own_trip_count_is_taken_and_without_one_a_loop_counts_once():
    for note, trips in (("known_trip_count", 12), ("nothing", 1)):
        costs = program_costs(parse_module(KNOWN.replace("known_trip_count", note)), chips=2)
        assert costs.collectives == {"all-to-all": Collective(trips, trips * 8)}
        assert costs.unknown_loops == (trips == 1)


def test_a_collective_spread_over_fusions_counts_once():
    costs = program_costs(parse_module(SPREAD), chips=4)
    assert costs.collectives == {
        "all-gather": Collective(1, 3 * 64),
        "reduce-scatter": Collective(1, 64 * 4 * 3 / 4),
    }


def test_steps_of_a_collective_in_a_loop_beside_it_send_nothing_more():
    costs = program_costs(parse_module(OVERLAPPED), chips=4)
    assert costs.collectives == {
        "all-gather": Collective(1, 3 * 64),
        "reduce-scatter": Collective(1, 64 * 4 * 3 / 4),
        "collective-permute": Collective(16, 16 * 64),
    }
    # A channel alone says nothing: combined collectives share one.
    apart = program_costs(parse_module(OVERLAPPED.replace("%async-collective-start.1 =", "%f1 =")), chips=4)
    assert apart.collectives["all-gather"] == Collective(17, 17 * 3 * 64)


def test_of_a_conditional_the_dearest_branch_counts():
    assert program_costs(parse_module(BRANCHES), chips=2).collectives == {
        "collective-permute": Collective(1, 32)
    }


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups=[2,8]<=[4,4]T(1,0)", 8),
        ("replica_groups=mesh['axis_0'=4] {'axis_0'}", 4),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}", 2),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", 2),
        ("replica_groups={}", 16),
        ("channel_id=1", 16),
    ],
)
def test_group_sizes(attributes: str, size: int):
    assert group_size(attributes, chips=16) == size


def test_types_and_text_without_a_program():
    arrays = parse_arrays(
        "(bf16[2,8]{1,0:T(8,128)(2,1)S(1)}, f32[], pred[3]{0}, f8e4m3fn[5], s4[4], token[])"
    )
    assert [array.bytes for array in arrays] == [32, 4, 3, 5, 2, 0]
    assert [array.space for array in arrays] == [1, 0, 0, 0, 0, 0]
    with pytest.raises(RunError, match="no ENTRY computation"):
        parse_module("HloModule empty\n")


REAL = """
import jax, jax.numpy as jnp
from functools import partial
from jax.sharding import AxisType, PartitionSpec as P
from prb_jax.measure.plan.costs import program_costs
from prb_jax.measure.plan.hlo import parse_module
from prb_jax.measure.plan.program import executed_flops

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "x", None), P()), out_specs=P(), check_vma=False)
def run(weights, x):
    def body(x, w):
        return jnp.tanh(x @ jax.lax.all_gather(w, "x", tiled=True)), None
    x, _ = jax.lax.scan(body, x, weights)
    return jax.lax.psum(x, "x")

args = jnp.zeros((5, 64, 64)), jnp.zeros((8, 64))
costs = program_costs(parse_module(run.lower(*args).compile().as_text()), chips=4)
assert {k: (c.count, c.bytes) for k, c in costs.collectives.items()} == {
    "all-gather": (5, 5 * 3 * 16 * 64 * 4.0), "all-reduce": (1, 2 * 8 * 64 * 4 * 3 / 4)
}, costs
assert costs.unknown_loops == 0
# every device multiplies with the whole matrix
assert executed_flops(run.trace(*args).jaxpr) == 4 * 5 * 2 * 8 * 64 * 64
"""


@pytest.mark.slow
def test_a_real_program_on_four_devices():
    environment = plain_environment(devices=4) | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr


# Two slices: scores are summed over all chips of a slice, then between slices, through the hosts.
BETWEEN = """\
HloModule slices, is_scheduled=true

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %token = token[] after-all()
  %send = (f32[8,128]{1,0}, u32[], token[]) send(%x, %token), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{SLICES}x{0:3}",_xla_megascale_transfer_type="KIND"}
  %recv = (f32[8,128]{1,0}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{SLICES}x{0:3}",_xla_megascale_transfer_type="KIND"}
  %sent = token[] send-done(%send), channel_id=2
  %came = (f32[8,128]{1,0}, token[]) recv-done(%recv), channel_id=1
  ROOT %y = f32[8,128]{1,0} get-tuple-element(%came), index=0
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("slices", "kind", "name", "factor"),
    [
        ("1,2", "ALL_REDUCE", "dcn all-reduce", 1.0),
        ("1:4", "ALL_REDUCE", "dcn all-reduce", 1.5),
        ("1:4", "ALL_GATHER", "dcn all-gather", 3.0),
        ("1,2", "ALL_TO_ALL", "dcn all-to-all", 0.5),
    ],
)
def test_collectives_between_slices(slices: str, kind: str, name: str, factor: float) -> None:
    size = 8 * 128 * 4
    text = BETWEEN.replace("SLICES", slices).replace("KIND", kind)
    costs = program_costs(parse_module(text), chips=8)
    assert costs.collectives == {name: Collective(1, factor * size)}
    assert costs.link_bytes == 0
    assert costs.memory_bytes == 2 * size  # read to be sent, written when it came
