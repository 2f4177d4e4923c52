"""Several slices of TPUs: which axis crosses the network between them, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from prb_jax.errors import MeshError
from prb_jax.platform.meshes import crossing_axis, make_mesh, parse_mesh
from prb_jax.platform.sharding import MeshShape


@dataclass(frozen=True)
class Chip:
    """What JAX looks at to lay out a mesh."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    process_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"


def chips(slices: int, rows: int = 2, columns: int = 2) -> list[Any]:
    """Slices of rows x columns chips, in no order."""
    made = [
        Chip(100 * index + columns * y + x, index, (x, y, 0))
        for y in range(rows)
        for x in range(columns)
        for index in range(slices)
    ]
    return made[::-1]


def slices_along(mesh: Any) -> np.ndarray:
    """[data, fsdp, sequence, tensor]: the slice of each device."""
    return np.vectorize(lambda chip: chip.slice_index)(mesh.devices)


@pytest.mark.parametrize(
    ("text", "slices", "shape"),
    [
        (None, 2, (2, 4, 1, 1)),
        ("data=2,fsdp=4", 2, (2, 4, 1, 1)),
        ("data=-1,tensor=2", 2, (4, 1, 1, 2)),
        ("data=4,fsdp=2,tensor=2", 4, (4, 2, 1, 2)),
    ],
)
def test_data_crosses_and_everything_else_stays_in_a_slice(text, slices, shape) -> None:
    mesh = make_mesh(text, devices=chips(slices))
    assert tuple(mesh.shape.values()) == shape
    assert len({chip.id for chip in mesh.devices.flat}) == 4 * slices
    numbers = slices_along(mesh)
    # a step along data may change the slice, one along the others never does
    assert (numbers == numbers[:, :1, :1, :1]).all()
    assert numbers[:, 0, 0, 0].tolist() == np.repeat(range(slices), shape[0] // slices).tolist()


def test_fsdp_crosses_where_it_is_asked_for() -> None:
    mesh = make_mesh("fsdp=8,dcn=fsdp", devices=chips(2))
    assert slices_along(mesh)[0, :, 0, 0].tolist() == [0] * 4 + [1] * 4
    mesh = make_mesh("fsdp=4,tensor=2,dcn=fsdp", devices=chips(2))
    assert slices_along(mesh)[0, :, 0].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert crossing_axis("fsdp=4,tensor=2,dcn=fsdp") == "fsdp"
    assert crossing_axis("fsdp=4") is None


@pytest.mark.parametrize(
    ("text", "slices", "parts"),
    [
        ("fsdp=8", 2, ["axis data=1 crosses the 2 slices of 4 devices", "multiple of 2", "dcn=fsdp"]),
        ("data=2,fsdp=6", 3, ["axis data=2 crosses the 3 slices of 4 devices", "multiple of 3", "dcn=fsdp"]),
        ("tensor=8", 2, ["axis data=1 crosses the 2 slices", "multiple of 2"]),
        ("data=6,fsdp=2,dcn=fsdp", 3, ["axis fsdp=2 crosses the 3 slices", "multiple of 3"]),
        ("data=2,fsdp=4,dcn=tensor", 2, ["dcn: expected data or fsdp, found 'tensor'"]),
        ("data=8,dcn=data", 1, ["dcn=data requires several TPU slices"]),
        ("dcn=data,dcn=fsdp,data=8", 2, ["'dcn' is given twice"]),
    ],
)
def test_what_cannot_be_names_the_axis_and_the_sizes(text: str, slices: int, parts: list[str]) -> None:
    with pytest.raises(MeshError) as refused:
        parse_mesh(text, devices=4 * slices if slices > 1 else 8, slices=slices)
    for part in (f"mesh '{text}'", *parts):
        assert part in str(refused.value)


def test_no_remedy_that_would_be_refused() -> None:
    with pytest.raises(MeshError) as refused:
        parse_mesh("tensor=8", devices=8, slices=2)
    assert "dcn=fsdp" not in str(refused.value)


def test_slices_of_different_sizes_are_refused() -> None:
    with pytest.raises(MeshError, match="different numbers of devices: 4 in slice 0, 3 in slice 1"):
        make_mesh(devices=[chip for chip in chips(2) if chip.id != 103])


def test_other_platforms_have_no_slices() -> None:
    """GPUs count hosts as slices; how their meshes are laid out is left as it is."""
    assert parse_mesh("fsdp=8", devices=8) == MeshShape(fsdp=8)
    assert make_mesh().size == 1
