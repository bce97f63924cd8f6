"""The layers that benchmarks/engines.py measures: of the targets, and grids for the cost model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import econv

PASSES = ("forward", "forward+backward")
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
MOST = 4e10  # multiplications of a layer of the grid for a CPU in the dense engine


class Case(NamedTuple):
    """One layer and its input."""

    group: str
    in_fields: int
    out_fields: int
    batch: int
    size: int
    kind: str = "group"  # or "lift"
    operators: str = "paper"
    stride: int = 1
    dtype: str = "float32"

    def layer(self, device: str) -> econv.layers.PDOConv2d:
        make = econv.LiftConv2d if self.kind == "lift" else econv.GroupConv2d
        options: dict[str, Any] = {"operators": self.operators, "stride": self.stride}
        options |= {"dtype": DTYPES[self.dtype], "device": device}
        return make(self.in_fields, self.out_fields, self.group, **options)

    def __str__(self) -> str:
        text = f"{self.kind} {self.group} {self.in_fields}→{self.out_fields}"
        text += f", batch {self.batch}, {self.size}×{self.size}"
        more = [f"stride {self.stride}"] * (self.stride > 1)
        more += [self.operators] * (self.operators != "paper")
        return ", ".join([text, *more, *[self.dtype] * (self.dtype != "float32")])


# Equal fields in a group four times as large: at most 6 times the time, wanted 5.
GROWTH = (
    Case("p8", 20, 20, 64, 32, dtype="bfloat16"),
    Case("p32", 20, 20, 64, 32, dtype="bfloat16"),
)
TARGETS = {  # least and wanted speed-up over dense, forward+backward
    "cpu": {
        Case("p8", 16, 16, 8, 32): (2.5, 5.0),
        Case("p16", 16, 16, 8, 32): (5.0, 9.0),
    },
    "cuda": {
        Case("p8", 40, 40, 512, 16, dtype="bfloat16"): (1.5, 3.0),
        Case("p8", 80, 80, 512, 8, dtype="bfloat16"): (2.0, 3.5),
        Case("p16", 20, 20, 256, 32, dtype="bfloat16"): (3.0, 6.0),
        Case("p8m", 20, 20, 256, 32, dtype="bfloat16"): (3.0, 6.0),
    },
}


def cpu_grid() -> Iterator[Case]:
    """Shapes from far below to far above the point where the engines are equally fast."""
    shapes = itertools.product(
        ("p1", "p2", "p4", "p6", "p8", "p12", "p16", "p4m", "p8m"), (2, 4, 8, 16), (8, 16, 32)
    )
    for number, (group, fields, size) in enumerate(shapes):
        yield Case(group, fields, fields, (1, 8)[number % 2], size)
    for group, fields in (("p4", 8), ("p8", 8), ("p8", 16), ("p16", 8)):
        yield Case(group, 3, fields, 8, 32, kind="lift")
        yield Case(group, fields, 2 * fields, 4, 16, stride=2)
        yield Case(group, fields, fields, 4, 16, dtype="float64")
        yield Case(group, fields, fields, 4, 28)
        for operators in ("order<=0", "order<=2"):
            yield Case(group, fields, fields, 4, 16, operators=operators)
    yield Case("p8", 40, 40, 4, 16)
    yield Case("p8", 80, 80, 4, 8)
    yield Case("p32", 8, 8, 2, 16)


# Batches and sizes of layers with so many fields. One kernel serves many of them, so that compilers
# have little to do.
CUDA_SHAPES: dict[str, dict[tuple[str, int], tuple[tuple[int, int], ...]]] = {
    "bfloat16": {
        ("p1", 16): ((64, 32),),
        ("p1", 64): ((16, 16), (128, 32), (64, 64)),
        ("p2", 40): ((16, 16), (128, 32), (64, 64)),
        ("p4", 4): ((64, 32),),
        ("p4", 10): ((32, 16), (128, 32), (64, 64)),
        ("p4", 20): ((16, 16), (128, 16), (128, 32), (256, 32)),
        ("p4", 40): ((64, 16), (256, 16), (128, 32)),
        ("p4", 80): ((64, 8), (512, 8), (256, 16)),
        ("p6", 10): ((64, 16), (128, 32)),
        ("p6", 20): ((32, 16), (128, 32)),
        ("p8", 2): ((128, 32),),
        ("p8", 4): ((64, 32),),
        ("p8", 8): ((16, 8), (64, 16), (128, 32), (64, 64)),
        ("p8", 20): ((16, 16), (64, 16), (64, 32), (128, 28), (256, 32)),
        ("p8", 40): ((16, 16), (128, 16), (512, 16)),
        ("p8", 80): ((32, 8), (128, 8), (512, 8)),
        ("p12", 10): ((64, 16), (64, 32)),
        ("p12", 20): ((64, 16), (128, 32)),
        ("p16", 4): ((32, 16), (128, 32)),
        ("p16", 10): ((16, 16), (64, 32)),
        ("p16", 20): ((16, 16), (64, 16), (256, 32)),
        ("p4m", 8): ((64, 16), (128, 32)),
        ("p4m", 20): ((32, 16), (128, 32)),
        ("p8m", 4): ((32, 16), (64, 32)),
        ("p8m", 20): ((16, 16), (64, 16), (256, 32)),
    },
    "float16": {
        ("p4", 20): ((128, 32),),
        ("p8", 20): ((64, 16), (256, 32)),
    },
    "float32": {
        ("p2", 40): ((64, 32),),
        ("p4", 8): ((128, 32),),
        ("p4", 20): ((32, 16), (128, 32)),
        ("p6", 10): ((64, 32),),
        ("p8", 2): ((64, 16),),
        ("p8", 8): ((16, 16), (128, 16), (128, 32)),
        ("p8", 20): ((32, 16), (64, 32)),
        ("p8", 40): ((128, 16),),
        ("p16", 10): ((16, 16), (64, 32)),
        ("p8m", 10): ((64, 32),),
    },
}


def cuda_grid() -> list[Case]:
    """The same for a GPU, in an order whose every beginning has something of everything."""
    families = [
        [Case(group, fields, fields, *shape, dtype=dtype) for shape in shapes]
        for dtype, known in CUDA_SHAPES.items()
        for (group, fields), shapes in known.items()
    ]
    others: dict[str, Any] = {"dtype": "bfloat16"}
    for group, fields, shapes in (
        ("p4", 20, ((128, 32),)),
        ("p8", 20, ((64, 32), (256, 32))),
        ("p16", 10, ((128, 32),)),
    ):
        families.append([Case(group, fields, 2 * fields, *s, stride=2, **others) for s in shapes])
        families.append([Case(group, 20, 20, *shapes[0], operators="order<=2", **others)])
    families.append([Case("p8", 3, 20, 128, 32, kind="lift", **others)])
    families.append([Case("p4", 3, 40, 256, 32, kind="lift", **others)])
    rounds = itertools.zip_longest(*families)
    return [case for several in rounds for case in several if case is not None]
